"""The configuration: pydantic models, one file per section. Importing it loads no torch."""
