"""A stand-in for TensorRT, for the script of a kit: engines are ONNX models that onnxruntime runs on the memory they are given.

It holds callers to what TensorRT asks of them: an engine with plugins runs only where its library was embedded or has been loaded, and
host code only where it was allowed; shapes must lie in the profile; every tensor needs an address. What goes wrong on purpose is named by
STAND_IN_FAULT. The definitions of fused operators are those of the model STAND_IN_FUNCTIONS.
"""

import ctypes
import enum
import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnxruntime

__version__ = os.environ.get("STAND_IN_TENSORRT", "10.6.0")
FAULT = os.environ.get("STAND_IN_FAULT", "")
CODE = b"\x7fELF\x02\x01\x01"


def fails(what):
    return what == FAULT


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2


def init_libnvinfer_plugins(logger, namespace):
    return True


class Registry:
    loaded: ClassVar[set] = set()

    def load_library(self, path):
        if fails("load_library"):
            return None
        with open(path, "rb") as file:
            assert file.read(7) == CODE
        self.loaded.add(path)
        return object()


def get_plugin_registry():
    return Registry()


class NetworkDefinitionCreationFlag(enum.IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class ProfilingVerbosity(enum.Enum):
    DETAILED = 2


class HardwareCompatibilityLevel(enum.Enum):
    AMPERE_PLUS = 1


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class LayerInformationFormat(enum.Enum):
    JSON = 1


class DataType(enum.Enum):
    FLOAT = onnx.TensorProto.FLOAT
    HALF = onnx.TensorProto.FLOAT16
    INT32 = onnx.TensorProto.INT32
    INT64 = onnx.TensorProto.INT64
    BOOL = onnx.TensorProto.BOOL


class Tensor:
    def __init__(self, value):
        self.name = value.name
        self.dtype = DataType(value.type.tensor_type.elem_type)
        self.shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)


class Network:
    model = None

    @property
    def inputs(self):
        return [Tensor(value) for value in self.model.graph.input]

    @property
    def num_inputs(self):
        return len(self.inputs)

    def get_input(self, index):
        return self.inputs[index]


class Problem:
    def desc(self):
        return "no importer for node odd"


class OnnxParser:
    def __init__(self, network, logger):
        self.network = network
        self.num_errors = 1

    def parse(self, data, path):
        if fails("parse"):
            return False
        model = onnx.ModelProto.FromString(data)
        onnx.load_external_data_for_model(model, os.path.dirname(path))
        self.network.model = model
        return True

    def get_error(self, index):
        return Problem()


class Profile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, name, low, mid, high):
        self.shapes[name] = (tuple(low), tuple(mid), tuple(high))


class Cache:
    def __init__(self, data):
        self.data = data

    def serialize(self):
        return self.data + b"layer"


class Config:
    plugins_to_serialize = ()
    hardware_compatibility_level = None
    profile = None

    def add_optimization_profile(self, profile):
        self.profile = profile
        return -1 if fails("profile") else 0

    def create_timing_cache(self, data):
        return Cache(data)

    def set_timing_cache(self, cache, ignore_mismatch):
        return not fails("cache")


class Builder:
    def __init__(self, logger):
        self.logger = logger

    def create_network(self, flags):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return Network()

    def create_builder_config(self):
        return Config()

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, network, config):
        if fails("build"):
            self.logger.log(ILogger.ERROR, "the cause")
            return None
        libraries = [Path(path).read_bytes() for path in config.plugins_to_serialize]
        header = {
            "profile": config.profile.shapes if config.profile else {},
            "compatible": config.hardware_compatibility_level is not None,
            "libraries": [len(library) for library in libraries],
        }
        text = json.dumps(header).encode()
        return b"%08d" % len(text) + text + b"".join(libraries) + network.model.SerializeToString()


def runnable(model):
    """The model with its fused operators defined, as onnxruntime knows no plugin."""
    with open(os.environ["STAND_IN_FUNCTIONS"], "rb") as file:
        model.functions.extend(onnx.ModelProto.FromString(file.read()).functions)
    for node in model.graph.node:
        if node.domain == "onnxfuse":
            declared = next(function for function in model.functions if function.name == node.op_type)
            node.output.extend([""] * (len(declared.output) - len(node.output)))
            kept = [a for a in node.attribute if a.name in ("epsilon", "approximate", "dtype")]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


class Engine:
    def __init__(self, data, host_code):
        size = int(data[:8])
        self.header = json.loads(data[8 : 8 + size])
        start = 8 + size + sum(self.header["libraries"])
        self.model = onnx.ModelProto.FromString(data[start:])
        if any(node.domain == "onnxfuse" for node in self.model.graph.node):
            embedded = bool(self.header["libraries"]) and host_code
            assert embedded or Registry.loaded, "plugin not found"
            self.model = runnable(self.model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.tensors = {v.name: Tensor(v) for v in [*self.model.graph.input, *self.model.graph.output]}
        self.inputs = [value.name for value in self.model.graph.input]
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name):
        return self.tensors[name].dtype

    def get_tensor_shape(self, name):
        return self.tensors[name].shape

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE

    def create_execution_context(self):
        return None if fails("context") else Context(self)

    def create_engine_inspector(self):
        return self

    def get_engine_information(self, form):
        layers = [
            {"Name": n.name, "LayerType": n.op_type, "Metadata": f"[ONNX Layer: {n.name}]", "Outputs": [{"Format/Datatype": "Half"}]}
            for n in self.model.graph.node
        ]
        return json.dumps({"Layers": layers})


class Runtime:
    engine_host_code_allowed = False

    def __init__(self, logger):
        self.logger = logger

    def deserialize_cuda_engine(self, data):
        if fails("deserialize"):
            self.logger.log(ILogger.ERROR, "serialized with another version")
            return None
        return Engine(bytes(data), self.engine_host_code_allowed)


class IProfiler:
    pass


class IOutputAllocator:
    pass


class Context:
    profiler = None

    def __init__(self, engine):
        self.engine = engine
        self.shapes = {}
        self.addresses = {}
        self.work = ctypes.CFUNCTYPE(None)(self._compute)

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.header["profile"].get(name, (shape, shape, shape))
        if fails("shape") or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def infer_shapes(self):
        return ["x"] if fails("infer") else []

    def get_tensor_shape(self, name):
        """The batch of the first input, as all test models have it."""
        if os.environ.get("STAND_IN_SIZED_BY_RUN"):
            return (-1, *self.engine.tensors[name].shape[1:])
        batch = next(iter(self.shapes.values()))[0]
        return tuple(batch if d < 0 else d for d in self.engine.tensors[name].shape)

    def set_output_allocator(self, name, allocator):
        self.addresses[name] = allocator
        return not fails("allocator")

    def set_tensor_address(self, name, address):
        assert address
        self.addresses[name] = address
        return not fails("address")

    def execute_async_v3(self, stream):
        assert stream
        if fails("execute"):
            return False
        if not ctypes.CDLL("libcuda.so.1").standInRecord(self.work):
            self._compute()
        return True

    def _compute(self):
        feeds = {name: self._view(name, self.shapes[name]).copy() for name in self.engine.inputs}
        for name, value in zip([o.name for o in self.engine.session.get_outputs()], self.engine.session.run(None, feeds), strict=True):
            if fails("wrong"):
                value = value + value.dtype.type(1)
            if hasattr(self.addresses[name], "notify_shape"):
                allocator = self.addresses[name]
                pointer = allocator.reallocate_output_async(name, 0, value.nbytes, 256, 1)
                allocator.notify_shape(name, value.shape)
                ctypes.memmove(pointer, value.ctypes.data, value.nbytes)
            else:
                self._view(name, value.shape)[...] = value
        if self.profiler is not None:
            for node in self.engine.model.graph.node:
                self.profiler.report_layer_time(node.name, 0.25)

    def _view(self, name, shape):
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.engine.tensors[name].dtype.value))
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)
