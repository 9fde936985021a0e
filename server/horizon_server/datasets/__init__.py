"""From a researcher's file to packed tokens: formats, validation, preparation."""
