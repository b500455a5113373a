"""Several prompts at a time: which tree pays, up to which batch, the proof and the prices."""
