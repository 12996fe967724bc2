"""Network parts, one file a part."""
