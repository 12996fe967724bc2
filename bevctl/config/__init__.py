"""Configuration as data: schema, loading with origins, packaged configs."""
