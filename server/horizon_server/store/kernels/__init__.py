"""The compiled half of the store: adamw.cpp and, where a compiler was at hand, the library built from it."""
