"""From a row to token ids and which of them are trained, as training and previews both see it."""
