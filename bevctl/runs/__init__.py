"""A run as data: records, their writer, and later their readers."""
