"""Reading and writing protobuf bytes besides the generated classes, and gRPC channels of our own."""
