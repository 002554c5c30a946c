"""The OpenAI door: HTTP in, JSON or server-sent events out. All serving is coordinator.serving's, as for gRPC.

Imported only by a coordinator that was told to open it (`--http`): FastAPI and uvicorn are in the extra `http`.
"""
