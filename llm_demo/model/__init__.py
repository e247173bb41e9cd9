"""A model's files: which model it is, its weights, adapters and tokenizer."""
