"""From files and hub datasets to rows of tokens on disk."""
