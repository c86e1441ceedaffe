// FusedRotary: inputs X, cos, sin; output Y [batch, heads, rows, size]. X lies so, or with rows before heads.
#include "../common/plugin.h"
#include "launch.h"

namespace onnxfuse
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

class FusedRotary final : public Node<FusedRotary>
{
public:
    static constexpr char const* kName = "FusedRotary";

    static std::vector<PluginField> const& fields()
    {
        static std::vector<PluginField> const known{{"x_perm", nullptr, PluginFieldType::kINT32, 4},
            {"rotary", nullptr, PluginFieldType::kINT32, 1}, {"interleaved", nullptr, PluginFieldType::kINT32, 1}};
        return known;
    }

    explicit FusedRotary(Fields const& fields)
        : x_perm_(fields.integers("x_perm", {0, 1, 2, 3}))
        , rotary_(fields.integer("rotary", 0, 0, 1 << 20))
        , interleaved_(fields.integer("interleaved", 0, 0, 1))
    {
        if (x_perm_ != std::vector<int32_t>{0, 1, 2, 3} && x_perm_ != std::vector<int32_t>{0, 2, 1, 3})
            refuse("field 'x_perm' must be 0 1 2 3 or 0 2 1 3");
        if (rotary_ < 2 || rotary_ % 2 != 0)
            refuse("field 'rotary' is %d; it must be an even number of elements", rotary_);
    }

    int outputs() const
    {
        return 1;
    }
    std::string key() const
    {
        return "onnxfuse 1 FusedRotary " + std::to_string(x_perm_[1]) + " " + std::to_string(rotary_) + " " + std::to_string(interleaved_);
    }
    std::vector<PluginField> state() const
    {
        return {state_field("x_perm", x_perm_), state_field("rotary", rotary_), state_field("interleaved", interleaved_)};
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder&) noexcept override
    {
        return status([&] {
            check(shapes_of(inputs, nbInputs));
            outputs[0].nbDims = 4;
            for (int i = 0; i < 4; ++i)
                outputs[0].d[i] = inputs[0].d[x_perm_[i]];
        });
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void*, cudaStream_t stream) noexcept override
    {
        return status([&] {
            nvinfer1::Dims const& x = inputDesc[0].dims;
            OnnxfuseRotary p{};
            p.dtype = static_cast<int>(dtype_of(inputDesc[0].type));
            p.batch = extent(x.d[0], "the batch");
            p.heads = extent(x.d[x_perm_[1]], "the number of heads");
            p.rows = extent(x.d[x_perm_[2]], "the number of rows");
            p.size = extent(x.d[3], "the size of a head");
            p.rotary = rotary_;
            p.interleaved = interleaved_;
            p.early = 1;
            int64_t const size = p.size, all = size * p.heads * p.rows;
            p.x = x_perm_[1] == 1 ? OnnxfuseRotaryTensor{inputs[0], all, size * p.rows, size} : OnnxfuseRotaryTensor{inputs[0], all, size, size * p.heads};
            p.y = {outputs[0], all, size * p.rows, size};
            p.cos = angles(inputDesc[1].dims, inputs[1]);
            p.sin = angles(inputDesc[2].dims, inputs[2]);
            if (int const failed = onnxfuse_launch_rotary(&p, stream))
                refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
        });
    }

    // Refuses shapes; extents of -1 are unknown.
    void check(std::vector<Shape> const& inputs) const
    {
        if (inputs.size() != 3)
            refuse("%zu inputs; it takes 3", inputs.size());
        if (inputs[0].rank() != 4)
            refuse("X has rank %d; it must have 4", inputs[0].rank());
        if (inputs[0].last() >= 0 && inputs[0].last() < rotary_)
            refuse("field 'rotary' is %d; a head of X %s has fewer elements", rotary_, inputs[0].text().c_str());
        for (int input : {1, 2})
        {
            Shape const& own = inputs[static_cast<size_t>(input)];
            bool fits = own.rank() >= 1 && own.rank() <= 4 && (own.last() < 0 || own.last() == rotary_);
            for (int i = 0; fits && i + 1 < own.rank(); ++i)
            {
                int64_t const of = inputs[0].extents[static_cast<size_t>(x_perm_[static_cast<size_t>(4 - own.rank() + i)])];
                fits = own.extents[i] < 0 || of < 0 || own.extents[i] == 1 || own.extents[i] == of;
            }
            if (!fits)
                refuse("%s %s does not fit X %s and %d turned elements", input == 1 ? "cos" : "sin", own.text().c_str(), inputs[0].text().c_str(), rotary_);
        }
    }

private:
    static OnnxfuseRotaryTensor angles(nvinfer1::Dims const& dims, void const* data)
    {
        auto const strides = broadcast_strides(dims);
        return {data, strides[0], strides[1], strides[2]};
    }

    std::vector<int32_t> x_perm_;
    int32_t rotary_, interleaved_;
};

static Registration<FusedRotary> const registration;
} // namespace onnxfuse
