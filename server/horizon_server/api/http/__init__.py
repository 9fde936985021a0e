"""REST and the metrics page. The only package that knows FastAPI."""
