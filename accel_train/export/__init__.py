"""Export of a trained model as files for torch and safetensors alone, with a proof of their outputs."""
