"""The object storage backend: S3 and compatible services, a directory, or memory."""
