"""The small language-model side of the book, in PyTorch."""
