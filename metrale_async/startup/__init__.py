"""What an engine is built from: device, kernels, model, memory, executor. Imported by the command line, by the
embedding entry (``AsyncEngine.start``) and by tests; imports everything below."""

from metrale_async.startup.engine_parts import choose_device, choose_kernels, load_engine_parts, load_tokenizer

__all__ = ["choose_device", "choose_kernels", "load_engine_parts", "load_tokenizer"]
