"""From a researcher's file to packed tokens: stored, checked and tokenised. `horizon_formats` defines what a data file
is."""
