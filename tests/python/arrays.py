"""The array libraries that the tests run with, behind one interface: values are
bytes, dtypes are names as in fserver_lib.Tensor.dtype."""

import ctypes
import importlib
import random

NAMES = ("torch", "numpy", "jax")  # the first one that there is is the library of tests that do not choose one

SIZES = {
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16, "bool": 1, "bfloat16": 2,
    "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two in a byte
    "uint16": 2, "uint32": 4, "uint64": 8,
}


def size(dtype, shape):
    n = SIZES[dtype]
    for d in shape:
        n *= d
    return n


def pattern(seed, dtype, shape):
    """Bytes for a tensor, the same for the same arguments. Those of bool are 0 and 1."""
    n = size(dtype, shape)
    data = random.Random(seed).getrandbits(8 * n).to_bytes(n, "little") if n > 0 else b""  # randbytes, which Python 3.8 lacks
    return bytes(b & 1 for b in data) if dtype == "bool" else data


def load(name):
    return {"torch": Torch, "numpy": NumPy, "jax": Jax}[name]()


class Torch:
    name = "torch"

    def __init__(self):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self.dtypes = [d for d in SIZES if hasattr(self.torch, d)]

    def zeros(self, dtype, shape):
        t = self.torch.empty(shape, dtype=getattr(self.torch, dtype))
        if t.numel():
            ctypes.memset(t.data_ptr(), 0, size(dtype, shape))
        return t

    def make(self, dtype, shape, data):
        t = self.zeros(dtype, shape)
        ctypes.memmove(t.data_ptr(), data, len(data))
        return t

    def bytes(self, t):
        return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""

    def dtype(self, t):
        return str(t.dtype).replace("torch.", "")

    def shape(self, t):
        return tuple(t.shape)

    def pointer(self, t):
        return t.data_ptr()

    def own(self, t):
        """Whether t has the type that get_batch returns if this library is loaded."""
        return type(t) is self.torch.Tensor


class NumPy:
    name = "numpy"

    def __init__(self):
        self.np = importlib.import_module("numpy")
        self.dtypes = [d for d in SIZES if self.has(d)]

    def has(self, dtype):
        try:
            self.np.dtype(dtype)
        except TypeError:
            return False
        if dtype == "bool":  # DLPack's bool
            return tuple(map(int, self.np.__version__.split(".")[:2])) >= (1, 25)
        return dtype != "bfloat16" and not dtype.startswith("float8")  # which JAX teaches NumPy

    def zeros(self, dtype, shape):
        if not self.has(dtype):
            return self.np.zeros(size(dtype, shape), "uint8")  # pulls compare bytes only
        return self.np.zeros(shape, dtype)

    def make(self, dtype, shape, data):
        return self.np.frombuffer(bytearray(data), dtype).reshape(shape)

    def view(self, t):
        if isinstance(t, self.np.ndarray):
            return t
        return self.np.from_dlpack(t)

    def bytes(self, t):
        return self.view(t).tobytes()

    def dtype(self, t):
        return str(self.view(t).dtype)

    def shape(self, t):
        return tuple(t.shape)

    def pointer(self, t):
        return self.view(t).__array_interface__["data"][0]

    def own(self, t):
        import fserver_lib

        return type(t) is fserver_lib.Tensor


class Jax(NumPy):
    """JAX's arrays cannot be written to: pushes are JAX's, pulls NumPy's."""

    name = "jax"

    def __init__(self):
        super().__init__()
        jax = importlib.import_module("jax")
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self.jax, self.jnp = jax, importlib.import_module("jax.numpy")
        self.dtypes = [d for d in SIZES if hasattr(self.jnp, d)]

    def make(self, dtype, shape, data):
        return self.jnp.asarray(self.np.frombuffer(bytearray(data), getattr(self.jnp, dtype)).reshape(shape))

    def pointer(self, t):
        # JAX copies arrays that are not sufficiently aligned.
        return (t if isinstance(t, self.np.ndarray) else self.np.from_dlpack(t)).__array_interface__["data"][0]

    def view(self, t):
        if isinstance(t, self.np.ndarray):
            return t
        return self.np.asarray(t if isinstance(t, self.jax.Array) else self.jax.dlpack.from_dlpack(t))
