// What TensorRT asks a plugin library for, and the list of its plugins.
#include <cuda_runtime_api.h>

#include "plugin.h"

namespace onnxfuse
{
nvinfer1::IPluginCreatorInterface* skip_layernorm_creator();
nvinfer1::IPluginCreatorInterface* skip_rmsnorm_creator();
nvinfer1::IPluginCreatorInterface* bias_gelu_creator();
nvinfer1::IPluginCreatorInterface* lstm_creator();
nvinfer1::IPluginCreatorInterface* gru_creator();
} // namespace onnxfuse

extern "C" ONNXFUSE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators)
{
    static nvinfer1::IPluginCreatorInterface* const creators[] = {
        onnxfuse::skip_layernorm_creator(),
        onnxfuse::skip_rmsnorm_creator(),
        onnxfuse::bias_gelu_creator(),
        onnxfuse::lstm_creator(),
        onnxfuse::gru_creator(),
    };
    nbCreators = static_cast<int32_t>(sizeof creators / sizeof creators[0]);
    return creators;
}

// Without it TensorRT refuses the library. The finder is not kept (see common/plugin.h).
extern "C" ONNXFUSE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

extern "C" char const* onnxfuse_launch_error(int status)
{
    return cudaGetErrorString(static_cast<cudaError_t>(status));
}
