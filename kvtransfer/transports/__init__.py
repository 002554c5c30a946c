"""Ways to move the bytes of a block: nixl, grpc, loopback. One port, see base.py."""
