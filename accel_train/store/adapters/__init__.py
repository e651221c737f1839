"""Files of adapters: those of peft, and of exports."""
