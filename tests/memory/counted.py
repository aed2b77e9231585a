"""Copies between host and device, counted from outside."""

import torch


class Counted(torch.overrides.TorchFunctionMode):
    """Counts copies between host and device, and new host memory, from outside: by the tensor calls that make them.

    On a CPU nothing says on which side a tensor is, and `.to` copies nothing: `host`, shared by all that count the same
    objects, holds the storages that `.to("cpu")` sent there. The device is what torch.cuda.current_device() gives.
    """

    def __init__(self, host=None):
        super().__init__()
        self.host = {} if host is None else host
        self.copied_bytes = self.host_bytes = self.host_allocations = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if name == "to":
            key, there = args[0].untyped_storage()._cdata, args[1] == "cpu"
            if there != (key in self.host):
                self.copied_bytes += args[0].nbytes
                self._made(result.nbytes if there else 0)
                self.host.pop(key, None)
                if there:
                    self.host[result.untyped_storage()._cdata] = result
        elif name in ("copy_", "cpu", "pin_memory", "clone"):  # clone: how platform cpu pins
            self.copied_bytes += args[0].nbytes
            self._made(result.nbytes if name != "copy_" else 0)
        elif name == "empty":
            self._made(result.nbytes)
        return result

    def _made(self, size_bytes):
        self.host_bytes += size_bytes
        self.host_allocations += size_bytes > 0
