// What TensorRT asks a plugin library for.
#include <cuda_runtime_api.h>

#include "plugin.h"

namespace onnxfuse
{
std::vector<nvinfer1::IPluginCreatorInterface*>& registered()
{
    static std::vector<nvinfer1::IPluginCreatorInterface*> creators;
    return creators;
}
} // namespace onnxfuse

extern "C" ONNXFUSE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators)
{
    nbCreators = static_cast<int32_t>(onnxfuse::registered().size());
    return onnxfuse::registered().data();
}

// Without it TensorRT refuses the library. The finder is not kept (see common/plugin.h).
extern "C" ONNXFUSE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

extern "C" char const* onnxfuse_launch_error(int status)
{
    return cudaGetErrorString(static_cast<cudaError_t>(status));
}
