"""Reading and writing protobuf bytes besides the generated classes."""
