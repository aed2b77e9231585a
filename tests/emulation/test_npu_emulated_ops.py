"""The emulated device's memory. Functions, each with a fault, in whole engines: test_npu_emulated.py."""

import torch

from verl_patches.emulation.npu import device, memory_pool
from verl_patches.emulation.npu.npu_module import npu


def test_the_driver_says_what_is_on_the_device():
    npu.empty_cache()
    (free, total), allocated = npu.mem_get_info(), npu.memory_allocated()
    with device.OnHost():
        made = torch.zeros(1000, device="cuda")
        derived, host = torch.cat([made[:500] * 2, made[500:]]), torch.zeros(1000)
        copies = [host.copy_(derived), torch.empty_like(made, device="cpu").copy_(made), host * 2]
        assert npu.memory_allocated() - allocated == 8000 and copies
        del derived
        made.untyped_storage().resize_(0)
        assert npu.memory_allocated() == allocated and npu.mem_get_info() == (free - 8000, total)
        npu.empty_cache()
        assert npu.mem_get_info() == (free, total)


def test_memory_of_sleep_mode_is_the_devices_while_it_is_unmapped(monkeypatch):
    handles = []
    monkeypatch.setattr(memory_pool._Pool, "storages", {})
    memory_pool.init_module(handles.append, None)
    with device.OnHost(), memory_pool.use_mem_pool(memory_pool.MemPool()):
        made = torch.zeros(1000, device="cuda").t()
        weights = [made, made.contiguous() + 1]
    (free, _), reserved = npu.mem_get_info(), npu.memory_reserved()
    assert [size for _, size, _, _ in handles] == [4000, 4000]
    for handle in handles:
        memory_pool.python_unmap_and_release(*handle)
    assert npu.mem_get_info()[0] - free == 8000 and npu.memory_reserved() == reserved and weights[1].isnan().all()
    for handle in handles:
        memory_pool.python_create_and_map(*handle)
    assert npu.mem_get_info()[0] == free
