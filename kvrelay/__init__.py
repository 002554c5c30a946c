"""What every part of KVRelay shares: the words of the system, its gRPC edge, its client and its command."""
