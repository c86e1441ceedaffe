// Runs a TensorRT engine that carries its plugins: TensorRT's runtime and the CUDA runtime, nothing of onnxfuse.
//
//   run_engine [--trust] ENGINE [NAME=SHAPE[:FILE]]...     run_engine --trust fused.engine ids=4x24:ids.bin mask=4x24
//
// An input without FILE is filled with zeros, one that is not named takes the shape that the engine was optimized for. FILE holds the
// elements as they lie in memory. Each output is written to NUMBER.bin in the current folder, and its name, type and shape are printed.
//
// An engine is code. Without --trust the code inside (the plugins) is not allowed to run: give it for engines that you built, or whose
// sha256 is the one in the manifest of somebody you trust.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

[[noreturn]] void fail(std::string const& what)
{
    std::fprintf(stderr, "error: %s\n", what.c_str());
    std::exit(1);
}

void check(cudaError_t status, char const* what)
{
    if (status != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(status));
}

class Logger : public ILogger
{
    void log(Severity severity, AsciiChar const* message) noexcept override
    {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", message);
    }
};

struct Type
{
    char const* name;
    size_t bits;
};

Type typeOf(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return {"float32", 32};
    case DataType::kHALF: return {"float16", 16};
    case DataType::kBF16: return {"bfloat16", 16};
    case DataType::kINT8: return {"int8", 8};
    case DataType::kUINT8: return {"uint8", 8};
    case DataType::kINT32: return {"int32", 32};
    case DataType::kINT64: return {"int64", 64};
    case DataType::kBOOL: return {"bool", 8};
    default: fail("a tensor of a type that this example does not know");
    }
}

size_t bytesOf(Dims const& shape, DataType type)
{
    size_t count = 1;
    for (int32_t i = 0; i < shape.nbDims; ++i)
    {
        if (shape.d[i] < 0) fail("a shape that is known only after the run; this example has no output allocator");
        count *= static_cast<size_t>(shape.d[i]);
    }
    return count * typeOf(type).bits / 8;
}

std::string text(Dims const& shape)
{
    std::ostringstream out;
    for (int32_t i = 0; i < shape.nbDims; ++i) out << (i ? "x" : "") << shape.d[i];
    return shape.nbDims ? out.str() : "scalar";
}

Dims parse(std::string const& given)
{
    Dims shape{};
    std::istringstream in(given);
    for (std::string part; std::getline(in, part, 'x');)
    {
        char* end = nullptr;
        long long const length = std::strtoll(part.c_str(), &end, 10);
        if (part.empty() || *end || length < 0 || shape.nbDims == Dims::MAX_DIMS) fail("not a shape: " + given + "; write it as 4x24");
        shape.d[shape.nbDims++] = length;
    }
    return shape;
}

std::vector<char> read(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file) fail(path + ": cannot be read");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Device memory that is given back when it goes out of scope. An empty tensor has an address, too.
std::shared_ptr<void> device(size_t size)
{
    void* memory = nullptr;
    check(cudaMalloc(&memory, size ? size : 1), "device memory");
    return {memory, [](void* p) { cudaFree(p); }};
}

struct Given
{
    std::string shape, file;
};

} // namespace

int main(int argc, char** argv)
{
    bool trust = false;
    std::string path;
    std::map<std::string, Given> given;
    for (int i = 1; i < argc; ++i)
    {
        std::string const argument = argv[i];
        size_t const equals = argument.find('='), colon = argument.find(':', equals == std::string::npos ? 0 : equals);
        if (argument == "--trust") trust = true;
        else if (path.empty()) path = argument;
        else if (equals == std::string::npos) fail("not an input: " + argument + "; write NAME=SHAPE or NAME=SHAPE:FILE");
        else if (colon == std::string::npos) given[argument.substr(0, equals)] = {argument.substr(equals + 1), ""};
        else given[argument.substr(0, equals)] = {argument.substr(equals + 1, colon - equals - 1), argument.substr(colon + 1)};
    }
    if (path.empty()) fail("usage: run_engine [--trust] ENGINE [NAME=SHAPE[:FILE]]...");

    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "no GPU can be used"); // TensorRT's runtime ends the process where there is no driver
    Logger logger;
    std::unique_ptr<IRuntime> runtime{createInferRuntime(logger)};
    if (!runtime) fail("TensorRT's runtime cannot be made; is there an NVIDIA driver?");
    runtime->setEngineHostCodeAllowed(trust);
    std::vector<char> const plan = read(path);
    std::unique_ptr<ICudaEngine> engine{runtime->deserializeCudaEngine(plan.data(), plan.size())};
    if (!engine) fail(path + ": TensorRT cannot load this engine; an engine with plugins inside needs --trust");
    std::unique_ptr<IExecutionContext> context{engine->createExecutionContext()};
    if (!context) fail(path + ": no execution context; is there enough GPU memory?");

    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream), "a stream");
    std::vector<std::string> outputs;
    std::map<std::string, std::shared_ptr<void>> memory;
    for (int32_t i = 0; i < engine->getNbIOTensors(); ++i)
    {
        char const* name = engine->getIOTensorName(i);
        if (engine->getTensorLocation(name) == TensorLocation::kHOST) fail(std::string(name) + " lies in the host's memory: not in this example");
        if (engine->getTensorIOMode(name) == TensorIOMode::kOUTPUT)
        {
            outputs.emplace_back(name);
            continue;
        }
        auto const known = given.find(name);
        Dims const shape = known != given.end() ? parse(known->second.shape) : engine->getProfileShape(name, 0, OptProfileSelector::kOPT);
        if (!context->setInputShape(name, shape)) fail(std::string(name) + ": the engine does not take the shape " + text(shape));
        size_t const size = bytesOf(shape, engine->getTensorDataType(name));
        std::vector<char> content(size, 0);
        if (known != given.end() && !known->second.file.empty()) content = read(known->second.file);
        if (content.size() != size) fail(known->second.file + ": " + std::to_string(content.size()) + " bytes, not " + std::to_string(size));
        memory[name] = device(size);
        check(cudaMemcpyAsync(memory[name].get(), content.data(), size, cudaMemcpyHostToDevice, stream), name);
        check(cudaStreamSynchronize(stream), name); // `content` is gone after this
        if (!context->setTensorAddress(name, memory[name].get())) fail(std::string(name) + ": TensorRT refuses its memory");
        if (known != given.end()) given.erase(known);
    }
    if (!given.empty()) fail(path + " has no input " + given.begin()->first);
    for (std::string const& name : outputs)
    {
        memory[name] = device(bytesOf(context->getTensorShape(name.c_str()), engine->getTensorDataType(name.c_str())));
        if (!context->setTensorAddress(name.c_str(), memory[name].get())) fail(name + ": TensorRT refuses its memory");
    }

    // A plugin that could not launch its kernel makes this false; nothing is thrown, and the outputs would be old memory.
    if (!context->enqueueV3(stream)) fail("the engine did not run");
    check(cudaStreamSynchronize(stream), "the run");

    for (size_t i = 0; i < outputs.size(); ++i)
    {
        Dims const shape = context->getTensorShape(outputs[i].c_str());
        DataType const type = engine->getTensorDataType(outputs[i].c_str());
        std::vector<char> content(bytesOf(shape, type));
        check(cudaMemcpy(content.data(), memory[outputs[i]].get(), content.size(), cudaMemcpyDeviceToHost), outputs[i].c_str());
        std::string const file = std::to_string(i) + ".bin";
        std::ofstream out(file, std::ios::binary);
        if (!out.write(content.data(), static_cast<std::streamsize>(content.size())).flush()) fail(file + ": cannot be written");
        std::printf("%s %s %s %s\n", file.c_str(), outputs[i].c_str(), typeOf(type).name, text(shape).c_str());
    }
    check(cudaStreamDestroy(stream), "the stream");
    return 0;
}
