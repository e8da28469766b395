"""Reading and writing protobuf bytes without the generated classes, and gRPC channels of our own."""
