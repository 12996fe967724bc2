"""Number ranges of a step: which operation first gave something non-finite, and which come close to it."""
