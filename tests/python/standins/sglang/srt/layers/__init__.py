"""A stand-in for SGLang: the one class that the dispatcher makes."""
