"""Code that several shipped hooks share (each hook is one file); other hooks may use it too."""
