// Elementwise: an expression whose kernels were generated and compiled when the engine was built. Inputs and outputs are those of the
// expression, in its order.
#include "../common/plugin.h"
#include "driver.h"
#include "layout.h"

namespace onnxfuse
{
namespace
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

char letter_of(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return 'f';
    case DataType::kHALF: return 'h';
    case DataType::kBF16: return 'b';
    case DataType::kINT32: return 'i';
    case DataType::kINT64: return 'l';
    case DataType::kBOOL: return '?';
    default: return 0;
    }
}

DataType type_of(char letter)
{
    switch (letter)
    {
    case 'f': return DataType::kFLOAT;
    case 'h': return DataType::kHALF;
    case 'b': return DataType::kBF16;
    case 'i': return DataType::kINT32;
    case 'l': return DataType::kINT64;
    default: return DataType::kBOOL;
    }
}

std::vector<std::vector<int64_t>> extents_of(std::vector<Shape> const& shapes)
{
    std::vector<std::vector<int64_t>> extents;
    for (Shape const& shape : shapes)
        extents.push_back(shape.extents);
    return extents;
}
} // namespace

class Elementwise final : public Node<Elementwise>
{
public:
    static constexpr char const* kName = "Elementwise";

    // layout: what the launcher knows of the expression (layout.h). code: machine code, base64.
    static std::vector<PluginField> const& fields()
    {
        static std::vector<PluginField> const known{{"layout", nullptr, PluginFieldType::kCHAR, 1},
            {"code", nullptr, PluginFieldType::kCHAR, 1}};
        return known;
    }

    explicit Elementwise(Fields const& fields)
        : layout_(Layout::parse(fields.text("layout", "")))
        , code_(std::make_shared<std::string const>(fields.text("code", "")))
    {
        if (code_->empty())
            refuse("field 'code' is empty; build the engine with onnxfuse build-engine, which compiles it");
    }

    int outputs() const
    {
        return static_cast<int>(layout_.outputs.size());
    }
    std::vector<PluginField> state() const
    {
        return {state_field("layout", layout_.text), state_field("code", *code_)};
    }
    std::string key() const
    {
        return "onnxfuse 1 Elementwise " + layout_.text;
    }
    // Refuses shapes; extents of -1 are unknown.
    void check(std::vector<Shape> const& inputs) const
    {
        layout_.full_shape(extents_of(inputs));
    }

    // --- building ---

    int32_t getOutputDataTypes(
        DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept override
    {
        return status([&] {
            check_count(nbInputs, nbOutputs);
            for (int32_t i = 0; i < nbInputs; ++i)
            {
                if (letter_of(inputTypes[i]) != layout_.inputs[i].type)
                {
                    refuse("input %d has TensorRT data type %d, and the expression was made for another; optimize the model again", i,
                        static_cast<int>(inputTypes[i]));
                }
            }
            for (int32_t i = 0; i < nbOutputs; ++i)
                outputTypes[i] = type_of(layout_.outputs[i].type);
        });
    }
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return status([&] {
            check_count(nbInputs, nbOutputs);
            check(shapes_of(inputs, nbInputs));
            for (int32_t i = 0; i < nbOutputs; ++i)
            {
                bool const reduced = layout_.outputs[i].reduced;
                outputs[i].nbDims = layout_.rank - (reduced && layout_.ending == Ending::kDropped ? 1 : 0);
                for (int axis = 0; axis < outputs[i].nbDims; ++axis)
                {
                    Layout::Source const from = layout_.source(axis);
                    outputs[i].d[axis] = inputs[from.input].d[from.axis];
                }
                if (reduced && layout_.ending == Ending::kKept)
                    outputs[i].d[layout_.rank - 1] = builder.constant(1);
            }
        });
    }
    bool supportsFormatCombination(
        int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept override
    {
        if (nbInputs != static_cast<int32_t>(layout_.inputs.size()) || nbOutputs != outputs())
            return false;
        char const wanted = pos < nbInputs ? layout_.inputs[pos].type : layout_.outputs[pos - nbInputs].type;
        return letter_of(inOut[pos].desc.type) == wanted && inOut[pos].desc.format == nvinfer1::TensorFormat::kLINEAR;
    }
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept override
    {
        return status([&] {
            check_count(nbInputs, nbOutputs);
            check(shapes_of(in, nbInputs));
            std::vector<std::vector<int64_t>> largest;
            for (int32_t i = 0; i < nbInputs; ++i)
                largest.push_back(shape_of(in[i].max).extents);
            int64_t count = 1;
            for (int64_t const extent : layout_.full_shape(largest))
            {
                if (extent > 0 && count > INT32_MAX / extent)
                    refuse("its tensors can have 2^31 elements or more; leave this node to TensorRT");
                count *= std::max<int64_t>(extent, 1);
            }
        });
    }
    // --- running ---

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*,
        int32_t nbOutputs) noexcept override
    {
        return status([&] {
            check_count(nbInputs, nbOutputs);
            shape_ = layout_.full_shape(extents_of(shapes_of(in, nbInputs)));
            if (!module_)
            {
                // Here and not in enqueue, which may be captured into a graph.
                std::shared_ptr<Module> const loaded = Module::of(decoded(*code_));
                loaded->prepare(layout_);
                sms_ = multiprocessors_here();
                module_ = loaded;
            }
        });
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const*, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void*, cudaStream_t stream) noexcept override
    {
        return status([&] {
            if (!module_)
                refuse("enqueue without onShapeChange");
            Launch const wanted = plan(layout_, shape_, inputs, outputs, sms_);
            if (wanted.grid > 0)
                module_->launch(wanted, stream);
        });
    }

private:
    void check_count(int32_t inputs, int32_t outputs) const
    {
        if (inputs != static_cast<int32_t>(layout_.inputs.size()) || outputs != this->outputs())
        {
            refuse("%d inputs and %d outputs; it has %zu and %zu", inputs, outputs, layout_.inputs.size(), layout_.outputs.size());
        }
    }

    Layout layout_;
    std::shared_ptr<std::string const> code_; // clones share it
    std::shared_ptr<Module> module_;
    std::vector<int64_t> shape_;
    int sms_ = 1;
};

static Registration<Elementwise> const registration;
} // namespace onnxfuse
