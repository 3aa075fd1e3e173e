"""A CUDA driver that launches nothing: what Triton's launchers hand to it can be read, on a machine without a GPU.

It is a C library in place of libcuda.so.1; kernels are compiled for sm_90 as ever. `install` must run in a process of its own,
before anything else asks Triton for its driver, with LD_LIBRARY_PATH naming the library's folder (`build`).

Of every launch the last `PARAMS` parameters are kept, 4 bytes of each: of a descriptor those of its address.
"""

import ctypes
import subprocess
from pathlib import Path

SOURCE = r"""
#include "cuda.h"
#include <string.h>
#undef cuDevicePrimaryCtxRetain
#define OK { return CUDA_SUCCESS; }
int fake_launches, fake_grid, fake_attributes, fake_encoded, fake_count;
unsigned fake_params[256];
CUresult cuInit(unsigned flags) OK
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "fake"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) OK
CUresult cuCtxSetLimit(CUlimit limit, size_t value) OK
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) OK
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) { *value = 232448; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)8; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) OK
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)8; return 0; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f)
{ *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) OK
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) OK
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *config) { *count = 1; return 0; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer)
{ memcpy(value, &pointer, 8); return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *size, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave a, CUtensorMapSwizzle b, CUtensorMapL2promotion c, CUtensorMapFloatOOBfill d)
{ memset(map, 0, sizeof(*map)); memcpy(map, &address, 8); fake_encoded++; return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    fake_launches++, fake_grid = config->gridDimX, fake_attributes = config->numAttrs;
    for (int i = 0; i < fake_count; i++) memcpy(&fake_params[i], params[i], 4);
    return CUDA_SUCCESS;
}
"""


def build(folder: Path) -> Path:
    """Compile the library into `folder`."""
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    (folder / "fake.c").write_text(SOURCE)
    library = folder / "libcuda.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-w", f"-I{include}", "-o", library, folder / "fake.c"]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


class Fake:
    """What the driver was last asked to do."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))

    def __getattr__(self, name: str) -> int:
        """`launches`, `encoded` (descriptors), `grid` and `attributes` (of the last launch); `count`: parameters to keep."""
        return ctypes.c_int.in_dll(self._library, f"fake_{name}").value

    def keep(self, count: int) -> None:
        ctypes.c_int.in_dll(self._library, "fake_count").value = count

    def params(self, count: int) -> list[int]:
        return list((ctypes.c_uint * 256).in_dll(self._library, "fake_params"))[:count]


def install(library: Path, stream=lambda device: 0) -> Fake:
    """Make Triton compile for sm_90 and launch through the library, tensors of the CPU included."""
    import torch
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    knobs.nvidia.libcuda_path = str(library.parent)
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = stream
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)
    torch.cuda.current_device = lambda: None  # the index of a CPU tensor's device
    torch.cuda.is_current_stream_capturing = lambda: False
    return Fake(library)
