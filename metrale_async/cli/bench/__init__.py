"""Benchmarks that need only an OpenAI-compatible URL: the concurrency ladder, and start-up time of our own server.

Owns the load generator, its prompts and the result files. Imports nothing of the engine: what it measures is a process
on the other end of a socket, ours or a peer's.
"""
