"""The nouns of strop. Standard library, numpy and pydantic only; importing this package never loads torch."""
