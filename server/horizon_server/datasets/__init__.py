"""From a researcher's file to packed tokens. What a file is stands in `horizon_formats`; here it is stored, checked and tokenised."""
