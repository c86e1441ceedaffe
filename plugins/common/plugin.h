// What the plugins' glue shares: fields, refusals, and the parts of IPluginV3 that are the same for all of them.
//
// A refusal is one line on stderr, "onnxfuse: OPERATOR: what is wrong; the remedy", and then the null pointer or non-zero status
// that TensorRT takes for a failure. TensorRT's logger is not used: its place in the virtual table differs between 10.x and 11.x.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../abi/NvInferPluginAbi.h"
#include "dtype.h"
#include "export.h"

// The text of a cudaError_t that a launcher returned.
extern "C" ONNXFUSE_EXPORT char const* onnxfuse_launch_error(int status);

namespace onnxfuse
{
// Why a plugin cannot be what was asked for.
struct Refusal : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(char const* format, ...) __attribute__((format(printf, 1, 2)));
void say(char const* op, char const* message) noexcept;

// Runs act(), which may refuse; returns whether it did not.
template <typename Act>
bool accepted(char const* op, Act act) noexcept
{
    try
    {
        act();
        return true;
    }
    catch (std::exception const& fault)
    {
        say(op, fault.what());
    }
    return false;
}

// The fields that a creator is given, read by name and converted: what an ONNX attribute holds decides its type, so a whole number
// arrives as INT32 where FLOAT32 is declared. Every fault names the field.
class Fields
{
public:
    // Refuses a field that is not among `known`.
    Fields(nvinfer1::PluginFieldCollection const* given, std::vector<nvinfer1::PluginField> const& known);

    float number(char const* name, float absent) const;
    int32_t integer(char const* name, int32_t absent, int32_t low, int32_t high) const;
    std::vector<int32_t> integers(char const* name, std::vector<int32_t> const& absent) const;
    std::string text(char const* name, char const* absent) const;

private:
    nvinfer1::PluginField const* find(char const* name) const;
    double value(nvinfer1::PluginField const& field, int32_t index = 0, int32_t length = 1) const;

    nvinfer1::PluginFieldCollection const* given_;
};

// The tensors of one enqueue.
struct Tensors
{
    void const* const* inputs;
    int inputs_count;
    void* const* outputs;
    int outputs_count;

    // Null where the tensor is absent.
    void const* input(int i) const
    {
        return i < inputs_count ? inputs[i] : nullptr;
    }
    void* output(int i) const
    {
        return i < outputs_count ? outputs[i] : nullptr;
    }
};

// Checks of shapes, for the three places that see them: expressions when the network is made (unknown extents are -1), ranges when
// it is built, extents at run time.
struct Shape
{
    std::vector<int64_t> extents;

    int rank() const
    {
        return static_cast<int>(extents.size());
    }
    int64_t last() const
    {
        return extents.empty() ? -1 : extents.back();
    }
    std::string text() const;
};

Shape shape_of(nvinfer1::DimsExprs const& dims);
Shape shape_of(nvinfer1::Dims const& dims);
std::vector<Shape> shapes_of(nvinfer1::DimsExprs const* dims, int32_t count);
std::vector<Shape> shapes_of(nvinfer1::PluginTensorDesc const* descs, int32_t count);
// As the network declares them: an extent that the profile leaves open is -1.
std::vector<Shape> shapes_of(nvinfer1::DynamicPluginTensorDesc const* descs, int32_t count);

// Refuse, naming the input, what is certainly wrong; an unknown extent (-1) is not.
void check_rank(char const* input, Shape const& shape, int least);
void check_same(char const* input, Shape const& shape, char const* other, Shape const& expected);
void check_per_column(char const* input, Shape const& shape, int64_t width);
void check_width(Shape const& shape, int64_t most);

Dtype dtype_of(nvinfer1::DataType type);
int64_t rows_of(nvinfer1::Dims const& dims);
bool is_float(nvinfer1::DataType type); // float32 or a half
bool is_half(nvinfer1::DataType type);

// All inputs and outputs are of the type of input 0.
void one_type(nvinfer1::DataType* outputs, int32_t outputs_count, nvinfer1::DataType const* inputs, int32_t inputs_count);

// An extent as the launchers take it.
int32_t extent(int64_t value, char const* name);

// Strides in elements of a tensor of rank 4 or less as one of rank 4, 0 where it is broadcast.
std::array<int64_t, 4> broadcast_strides(nvinfer1::Dims const& dims);

// The field 'epsilon', ONNX's default where it is absent.
float checked_epsilon(Fields const& fields);

// Fields that make a plugin again; they point to `value`.
nvinfer1::PluginField state_field(char const* name, float const& value);
nvinfer1::PluginField state_field(char const* name, int32_t const& value);
nvinfer1::PluginField state_field(char const* name, std::vector<int32_t> const& value);
nvinfer1::PluginField state_field(char const* name, std::string const& value);

// What is the same for every plugin. Derived has
//   static constexpr char const* kName;
//   static std::vector<PluginField> const& fields();        what the creator takes: names and types
//   explicit Derived(Fields const&);                         refuses bad fields
//   int outputs() const;
//   std::vector<PluginField> state() const;                  the fields that make the same plugin again; data in *this
//   std::string key() const;                                 all that changes its speed
//   void check(std::vector<Shape> const& inputs) const;      refuses shapes; extents of -1 are unknown
// What most plugins have is here, for others to override: one element type, no format but linear, and one output, or several, as input 0.
template <typename Derived>
class Node : public nvinfer1::IPluginV3,
             public nvinfer1::IPluginV3OneCore,
             public nvinfer1::IPluginV3OneBuild,
             public nvinfer1::IPluginV3OneRuntime
{
public:
    // getInterfaceInfo stays each base's own: an override here would answer for all four.

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override
    {
        switch (type)
        {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    nvinfer1::IPluginV3* clone() noexcept override
    {
        std::unique_ptr<Derived> copy;
        accepted(Derived::kName, [&] { copy = std::make_unique<Derived>(self()); });
        return copy.release();
    }
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override
    {
        return clone();
    }

    nvinfer1::AsciiChar const* getPluginName() const noexcept override
    {
        return Derived::kName;
    }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override
    {
        return "onnxfuse";
    }

    int32_t getNbOutputs() const noexcept override
    {
        return self().outputs();
    }
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
        int32_t nbInputs) const noexcept override
    {
        return status([&] { one_type(outputTypes, nbOutputs, inputTypes, nbInputs); });
    }
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept override
    {
        return status([&] {
            self().check(shapes_of(inputs, nbInputs));
            std::fill(outputs, outputs + nbOutputs, inputs[0]);
        });
    }
    bool supportsFormatCombination(
        int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        nvinfer1::PluginTensorDesc const& desc = inOut[pos].desc;
        return is_float(desc.type) && desc.type == inOut[0].desc.type && desc.format == nvinfer1::TensorFormat::kLINEAR;
    }
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        return status([&] { self().check(shapes_of(in, nbInputs)); });
    }
    int32_t onShapeChange(
        nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*, int32_t) noexcept override
    {
        return status([&] { self().check(shapes_of(in, nbInputs)); });
    }

    char const* getTimingCacheID() noexcept override
    {
        return described();
    }
    char const* getMetadataString() noexcept override
    {
        return described();
    }

    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override
    {
        nvinfer1::PluginFieldCollection const* collection = nullptr;
        accepted(Derived::kName, [&] {
            state_ = self().state();
            collection_ = {static_cast<int32_t>(state_.size()), state_.data()};
            collection = &collection_;
        });
        return collection;
    }

protected:
    // What TensorRT reads through a pointer belongs to this object alone and is not copied.
    Node() = default;
    Node(Node const&) noexcept {}
    Node& operator=(Node const&) = delete;

    Derived const& self() const
    {
        return static_cast<Derived const&>(*this);
    }
    // 0 where act() did not refuse: what TensorRT takes for success.
    template <typename Act>
    static int32_t status(Act act) noexcept
    {
        return accepted(Derived::kName, act) ? 0 : 1;
    }

private:
    char const* described() noexcept
    {
        accepted(Derived::kName, [&] { described_ = self().key(); });
        return described_.c_str();
    }

    std::vector<nvinfer1::PluginField> state_;
    nvinfer1::PluginFieldCollection collection_;
    std::string described_;
};

// A plugin whose tensors have one element type and whose outputs have the shape of input 0. Derived also has
//   static constexpr int64_t kMaxWidth;                      the longest last axis
//   int launch(int dtype, Tensors const&, int64_t rows, int64_t width, cudaStream_t) const;      a cudaError_t
template <typename Derived>
class Plugin : public Node<Derived>
{
public:
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept override
    {
        return status([&] {
            check_inputs(shapes_of(inputs, nbInputs));
            std::fill(outputs, outputs + nbOutputs, inputs[0]);
        });
    }
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept override
    {
        return status([&] {
            check_inputs(shapes_of(in, nbInputs));
            check_width(shape_of(in[0].max), Derived::kMaxWidth);
            inputs_count_ = nbInputs;
            outputs_count_ = nbOutputs;
        });
    }

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*,
        int32_t nbOutputs) noexcept override
    {
        return status([&] {
            check_inputs(shapes_of(in, nbInputs));
            inputs_count_ = nbInputs;
            outputs_count_ = nbOutputs;
        });
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void*, cudaStream_t stream) noexcept override
    {
        return status([&] {
            if (inputs_count_ == 0)
                refuse("enqueue without onShapeChange");
            nvinfer1::Dims const& dims = inputDesc[0].dims;
            int const failed = self().launch(static_cast<int>(dtype_of(inputDesc[0].type)),
                Tensors{inputs, inputs_count_, outputs, outputs_count_}, rows_of(dims), dims.d[dims.nbDims - 1], stream);
            if (failed)
                refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
        });
    }

protected:
    using Node<Derived>::self;
    using Node<Derived>::status;

private:
    void check_inputs(std::vector<Shape> const& inputs) const
    {
        self().check(inputs);
        check_width(inputs[0], Derived::kMaxWidth);
    }

    int32_t inputs_count_ = 0; // as last told: enqueue is not given them
    int32_t outputs_count_ = 0;
};

template <typename P>
class Creator : public nvinfer1::IPluginCreatorV3One
{
public:
    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* fc,
        nvinfer1::TensorRTPhase) noexcept override
    {
        std::unique_ptr<P> made;
        accepted(P::kName, [&] { made = std::make_unique<P>(Fields(fc, P::fields())); });
        return made.release();
    }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override
    {
        static nvinfer1::PluginFieldCollection const names{static_cast<int32_t>(P::fields().size()), P::fields().data()};
        return &names;
    }
    nvinfer1::AsciiChar const* getPluginName() const noexcept override
    {
        return P::kName;
    }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override
    {
        return "onnxfuse";
    }
};

// The creators of the library, made known when it is loaded: each plugin.cpp registers its own.
std::vector<nvinfer1::IPluginCreatorInterface*>& registered();

template <typename P>
struct Registration
{
    Registration()
    {
        static Creator<P> creator;
        registered().push_back(&creator);
    }
};
} // namespace onnxfuse
