"""Export of a trained model as files that need torch and safetensors alone, with the proof that they are right."""
