"""Pieces that several shipped hooks need, each hook being one file; other hooks may use them too."""
