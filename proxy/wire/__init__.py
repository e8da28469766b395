"""Reading and writing protobuf bytes beside the generated classes."""
