"""A stand-in for TensorRT on the stand-in for the driver: an engine copies its largest input to every output, whoever computes it.

STAND_IN_TRT plants a fault in engines with generated kernels: "wrong" leaves outputs as they are, "crash" ends the process that builds one.
"""

import ctypes
import enum
import math
import os

import onnx

__version__ = "10.6.0.stand-in"

DataType = enum.Enum("DataType", "float32 float16 bfloat16 int32 int64 bool")
float32, float16, bfloat16, int32, int64, bool = DataType
_ONNX = {1: float32, 10: float16, 16: bfloat16, 6: int32, 7: int64, 9: bool}
_SIZES = {float32: 4, float16: 2, bfloat16: 2, int32: 4, int64: 8, bool: 1}
NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1})
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = range(3)

    def __init__(self):
        pass


def init_libnvinfer_plugins(log, namespace):
    return True


class _Registry:
    def load_library(self, path):
        return ctypes.CDLL(path)


def get_plugin_registry():
    return _Registry()


class Builder:
    def __init__(self, log):
        pass

    def create_network(self, flags):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return {}

    def create_builder_config(self):
        return _Config()

    def build_serialized_network(self, network, config):
        if os.environ.get("STAND_IN_TRT") == "crash" and _is_fused(onnx.load_from_string(network["model"])):
            os._exit(3)
        return network["model"]


class _Config:
    plugins_to_serialize = ()


class OnnxParser:
    num_errors = 0

    def __init__(self, network, log):
        self.network = network

    def parse(self, model):
        self.network["model"] = model
        return True


def _is_fused(model):
    return any(node.op_type == "Elementwise" for node in model.graph.node)


class Runtime:
    def __init__(self, log):
        pass

    def deserialize_cuda_engine(self, plan):
        return _Engine(onnx.load_from_string(plan))


class _Engine:
    num_layers = 1

    def __init__(self, model):
        self.fused = _is_fused(model)
        self.inputs = [one.name for one in model.graph.input]
        self.names = [*self.inputs, *(one.name for one in model.graph.output)]
        self.kinds = {one.name: _ONNX[one.type.tensor_type.elem_type] for one in (*model.graph.input, *model.graph.output)}
        self.shapes = {one.name: tuple(axis.dim_value for axis in one.type.tensor_type.shape.dim) for one in model.graph.input}
        full = max(self.shapes.values(), key=lambda shape: (len(shape), math.prod(shape)))
        self.shapes.update({one.name: full for one in model.graph.output})
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, at):
        return self.names[at]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return self.kinds[name]

    def get_tensor_shape(self, name):
        return self.shapes[name]

    def create_execution_context(self):
        return _Context(self)


class _Context:
    def __init__(self, engine):
        self.engine, self.addresses = engine, {}
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def get_tensor_shape(self, name):
        return self.engine.shapes[name]

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        engine = self.engine
        if os.environ.get("STAND_IN_TRT") == "wrong" and engine.fused:
            return True
        sizes = {name: math.prod(engine.shapes[name]) * _SIZES[engine.kinds[name]] for name in engine.names}
        source = max(engine.inputs, key=lambda name: sizes[name])
        for name in engine.names[len(engine.inputs) :]:
            for start in range(0, sizes[name], sizes[source]):
                to, given = ctypes.c_void_p(self.addresses[name] + start), ctypes.c_void_p(self.addresses[source])
                size = ctypes.c_size_t(min(sizes[source], sizes[name] - start))
                self.cuda.cuMemcpyDtoDAsync_v2(to, given, size, ctypes.c_void_p(stream))
        return True
