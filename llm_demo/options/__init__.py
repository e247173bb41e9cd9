"""What a run may ask for beside the core: each module is loaded only then, and has one function
that changes the model."""
