// FusedAttention: softmax(scale * Q K^T + masks) V, with the transposes that split heads and join them.
//
// Inputs: Q, K, V, or one tensor in which they lie side by side (packed); then what is added to the scores (`added` of them) and which scores
// are kept (kept). Output: Y, as Q.
#include <algorithm>

#include "../common/tactics.h"
#include "launch.h"

namespace onnxfuse
{
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

class FusedAttention final : public Tuned<FusedAttention>
{
public:
    static constexpr char const* kName = "FusedAttention";
    using Problem = OnnxfuseAttention;

    static std::vector<PluginField> const& fields()
    {
        static std::vector<PluginField> const known{{"scale", nullptr, PluginFieldType::kFLOAT32, 1},
            {"fill", nullptr, PluginFieldType::kFLOAT32, 1}, {"heads", nullptr, PluginFieldType::kINT32, 1},
            {"kv_heads", nullptr, PluginFieldType::kINT32, 1}, {"packed", nullptr, PluginFieldType::kINT32, 1},
            {"added", nullptr, PluginFieldType::kINT32, 1}, {"kept", nullptr, PluginFieldType::kINT32, 1},
            {"hides", nullptr, PluginFieldType::kINT32, 1}, {"safe", nullptr, PluginFieldType::kINT32, 1},
            {"causal", nullptr, PluginFieldType::kINT32, 1}, {"widths", nullptr, PluginFieldType::kINT32, 3},
            {"q_perm", nullptr, PluginFieldType::kINT32, 4}, {"k_perm", nullptr, PluginFieldType::kINT32, 4},
            {"v_perm", nullptr, PluginFieldType::kINT32, 4}, {"y_perm", nullptr, PluginFieldType::kINT32, 4}};
        return known;
    }

    explicit FusedAttention(Fields const& fields)
        : scale_(fields.number("scale", 1.0f))
        , fill_(fields.number("fill", 0.0f))
        , heads_(fields.integer("heads", 0, 0, 1 << 16))
        , kv_heads_(fields.integer("kv_heads", heads_, 0, 1 << 16))
        , packed_(fields.integer("packed", 0, 0, 1))
        , added_(fields.integer("added", 0, 0, 2))
        , kept_(fields.integer("kept", 0, 0, 1))
        , hides_(fields.integer("hides", 0, 0, 1))
        , safe_(fields.integer("safe", 0, 0, 1))
        , causal_(fields.integer("causal", 0, 0, 1))
        , widths_(fields.integers("widths", {0, 0, 0}))
        , q_perm_(perm(fields, "q_perm"))
        , k_perm_(perm(fields, "k_perm"))
        , v_perm_(perm(fields, "v_perm"))
        , y_perm_(perm(fields, "y_perm"))
    {
        if (heads_ < 1 || kv_heads_ < 1 || heads_ % kv_heads_ != 0)
            refuse("fields 'heads' and 'kv_heads' are %d and %d; the first must be a multiple of the second", heads_, kv_heads_);
        if (packed_ && (widths_.size() != 3 || widths_[0] < 1 || widths_[1] < 1 || widths_[2] < 1 || widths_[0] % heads_ || widths_[1] % kv_heads_ || widths_[2] % kv_heads_))
            refuse("field 'widths' must hold the widths of Q, K and V, multiples of their heads");
    }

    int outputs() const
    {
        return 1;
    }

    std::string key() const
    {
        std::string text = "onnxfuse 1 FusedAttention";
        for (int32_t number : {heads_, kv_heads_, packed_, added_, kept_, safe_, causal_, int{rows_first(q_perm_)}, int{rows_first(k_perm_)}, int{rows_first(v_perm_)}, int{rows_first(y_perm_)}})
            text += " " + std::to_string(number);
        return text;
    }

    std::vector<PluginField> state() const
    {
        return {state_field("scale", scale_), state_field("fill", fill_), state_field("heads", heads_), state_field("kv_heads", kv_heads_),
            state_field("packed", packed_), state_field("added", added_), state_field("kept", kept_), state_field("hides", hides_),
            state_field("safe", safe_), state_field("causal", causal_), state_field("widths", widths_), state_field("q_perm", q_perm_),
            state_field("k_perm", k_perm_), state_field("v_perm", v_perm_), state_field("y_perm", y_perm_)};
    }

    // --- building --------------------------------------------------------------------------------------------------------

    int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept override
    {
        return status([&] {
            dtype_of(inputTypes[0]);
            for (int32_t i = 1; i < nbInputs; ++i)
            {
                if (i == keep_place() ? inputTypes[i] != DataType::kBOOL : inputTypes[i] != inputTypes[0])
                    refuse("input %d has another type than %s", i, i == keep_place() ? "bool" : "input 0; cast all inputs to one type");
            }
            std::fill(outputTypes, outputTypes + nbOutputs, inputTypes[0]);
        });
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return status([&] {
            check(shapes_of(inputs, nbInputs));
            auto const* const rows = inputs[0].d[packed_ || rows_first(q_perm_) ? 1 : 2];
            outputs[0].nbDims = 4;
            outputs[0].d[0] = inputs[0].d[0];
            outputs[0].d[1] = rows_first(y_perm_) ? rows : builder.constant(heads_);
            outputs[0].d[2] = rows_first(y_perm_) ? builder.constant(heads_) : rows;
            outputs[0].d[3] = packed_ ? builder.constant(widths_[2] / kv_heads_) : inputs[2].d[3];
        });
    }

    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t, int32_t) noexcept override
    {
        DataType const type = inOut[pos].desc.type;
        if (inOut[pos].desc.format != nvinfer1::TensorFormat::kLINEAR)
            return false;
        if (pos == keep_place())
            return type == DataType::kBOOL;
        return is_float(type) && type == inOut[0].desc.type;
    }

    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) const noexcept override
    {
        size_t most = 0;
        accepted(kName, [&] {
            Problem problem = sized(shaped(in, nbInputs, &nvinfer1::DynamicPluginTensorDesc::max).data());
            most = onnxfuse_attention_workspace_up_to(&problem);
            for (Problem const& tactic : tactics())
            {
                use(problem, tactic);
                most = std::max(most, onnxfuse_attention_workspace_up_to(&problem));
            }
        });
        return most;
    }

    static std::vector<Problem> const& tactics()
    {
        static std::vector<Problem> const all = [] {
            std::vector<Problem> made;
            constexpr int kAll[][3] = {{16, 4, 1}, {16, 8, 1}, {32, 4, 1}, {32, 8, 1}, {64, 4, 1}, {64, 8, 1}, {16, 4, 2}, {64, 4, 2}, {16, 4, 4},
                {16, 4, 8}, {16, 4, 16}};
            for (auto const& [rows, warps, splits] : kAll)
            {
                made.emplace_back();
                made.back().rows = rows;
                made.back().warps = warps;
                made.back().splits = splits;
            }
            return made;
        }();
        return all;
    }
    static void use(Problem& problem, Problem const& tactic)
    {
        problem.rows = tactic.rows;
        problem.warps = tactic.warps;
        problem.splits = tactic.splits;
    }
    static int supported(Problem const& problem)
    {
        return onnxfuse_attention_supported(&problem);
    }
    static int launch(Problem const& problem, void* workspace, cudaStream_t stream)
    {
        return onnxfuse_launch_attention(&problem, workspace, onnxfuse_attention_workspace(&problem), stream);
    }

    // --- running ---------------------------------------------------------------------------------------------------------

    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override
    {
        return status([&] {
            Problem problem = sized(inputDesc);
            if (problem.batch == 0 || problem.queries == 0)
                return;
            place(problem, inputs, outputs);
            run(problem, workspace, stream);
        });
    }

    // Refuses shapes; extents of -1 are unknown.
    void check(std::vector<Shape> const& inputs) const
    {
        int const count = masks_place() + added_ + kept_;
        if (static_cast<int>(inputs.size()) != count)
            refuse("%zu inputs; its fields tell of %d", inputs.size(), count);
        int64_t batch = inputs[0].rank() > 0 ? inputs[0].extents[0] : -1, rows = -1, keys = -1;
        if (packed_)
        {
            int64_t width = 1;
            for (int i = 2; i < inputs[0].rank(); ++i)
                width = width < 0 || inputs[0].extents[i] < 0 ? -1 : width * inputs[0].extents[i];
            int64_t const wanted = int64_t{widths_[0]} + widths_[1] + widths_[2];
            if (inputs[0].rank() < 3 || (width >= 0 && width != wanted))
                refuse("Q, K and V %s are not %lld elements behind batch and rows", inputs[0].text().c_str(), static_cast<long long>(wanted));
            rows = keys = inputs[0].extents[1];
        }
        else
        {
            char const* const names[] = {"Q", "K", "V"};
            std::vector<int32_t> const* const perms[] = {&q_perm_, &k_perm_, &v_perm_};
            for (int i = 0; i < 3; ++i)
            {
                if (inputs[i].rank() != 4)
                    refuse("%s has rank %d; it must have 4", names[i], inputs[i].rank());
            }
            rows = inputs[0].extents[rows_first(q_perm_) ? 1 : 2];
            keys = inputs[1].extents[rows_first(k_perm_) ? 1 : 2];
            auto expected = [&](std::vector<int32_t> const& order, int64_t heads, int64_t of, int64_t size) {
                return rows_first(order) ? Shape{{batch, of, heads, size}} : Shape{{batch, heads, of, size}};
            };
            check_same("Q", inputs[0], "batch, rows, heads", expected(*perms[0], heads_, rows, inputs[0].last()));
            check_same("K", inputs[1], "batch, keys, heads", expected(*perms[1], kv_heads_, keys, inputs[0].last()));
            check_same("V", inputs[2], "batch, keys, heads", expected(*perms[2], kv_heads_, keys, inputs[2].last()));
        }
        for (int i = masks_place(); i < count; ++i)
            check_mask(i, inputs[i], batch, rows, keys);
    }

    Problem sized(nvinfer1::PluginTensorDesc const* inputs) const
    {
        Problem p{};
        p.dtype = static_cast<int>(dtype_of(inputs[0].type));
        p.heads = heads_;
        p.kv_heads = kv_heads_;
        p.scale = scale_;
        p.fill = fill_;
        p.hides = hides_;
        p.safe = safe_;
        p.causal = causal_;
        p.batch = extent(inputs[0].dims.d[0], "the batch");
        if (packed_)
        {
            p.queries = p.keys = extent(inputs[0].dims.d[1], "the number of rows");
            p.head = widths_[0] / heads_;
            p.width = widths_[2] / kv_heads_;
            int64_t const row = int64_t{widths_[0]} + widths_[1] + widths_[2];
            for (OnnxfuseAttentionTensor* tensor : {&p.q, &p.k, &p.v})
                *tensor = {nullptr, p.queries * row, row, tensor == &p.v ? p.width : p.head};
        }
        else
        {
            p.queries = extent(inputs[0].dims.d[rows_first(q_perm_) ? 1 : 2], "the number of queries");
            p.keys = extent(inputs[1].dims.d[rows_first(k_perm_) ? 1 : 2], "the number of keys");
            p.head = extent(inputs[0].dims.d[3], "the size of a head");
            p.width = extent(inputs[2].dims.d[3], "the size of a head");
            p.q = strided(q_perm_, heads_, p.queries, p.head);
            p.k = strided(k_perm_, kv_heads_, p.keys, p.head);
            p.v = strided(v_perm_, kv_heads_, p.keys, p.width);
        }
        p.output = strided(y_perm_, heads_, p.queries, p.width);
        for (int i = 0; i < added_; ++i)
            p.added[i] = masked(inputs[masks_place() + i].dims);
        if (kept_)
            p.keep = masked(inputs[keep_place()].dims);
        return p;
    }
    void place(Problem& problem, void const* const* inputs, void* const* outputs) const
    {
        int64_t const element = problem.dtype == static_cast<int>(Dtype::kFloat32) ? 4 : 2;
        auto const* const first = static_cast<char const*>(inputs[0]);
        problem.q.data = first;
        problem.k.data = packed_ ? first + element * widths_[0] : inputs[1];
        problem.v.data = packed_ ? first + element * (widths_[0] + widths_[1]) : inputs[2];
        problem.output.data = outputs[0];
        for (int i = 0; i < added_; ++i)
            problem.added[i].data = inputs[masks_place() + i];
        if (kept_)
            problem.keep.data = inputs[keep_place()];
    }

private:
    static std::vector<int32_t> perm(Fields const& fields, char const* name)
    {
        std::vector<int32_t> const found = fields.integers(name, {0, 2, 1, 3});
        if (found != std::vector<int32_t>{0, 1, 2, 3} && found != std::vector<int32_t>{0, 2, 1, 3})
            refuse("field '%s' must be 0 1 2 3 or 0 2 1 3", name);
        return found;
    }
    static bool rows_first(std::vector<int32_t> const& perm)
    {
        return perm[1] == 2;
    }
    int masks_place() const
    {
        return packed_ ? 1 : 3;
    }
    int keep_place() const
    {
        return kept_ ? masks_place() + added_ : -1;
    }

    // A mask is a broadcast along any of its axes; one of fewer batch entries is used again for those that follow.
    void check_mask(int input, Shape const& mask, int64_t batch, int64_t rows, int64_t keys) const
    {
        int64_t const wanted[4] = {batch, heads_, rows, keys};
        if (mask.rank() > 4)
            refuse("input %d, a mask, has rank %d; it must have 4 at most", input, mask.rank());
        for (int i = 0; i < mask.rank(); ++i)
        {
            int const axis = 4 - mask.rank() + i;
            int64_t const own = mask.extents[i], of = wanted[axis];
            bool const fits = own < 0 || of < 0 || own == of || own == 1 || (axis == 0 && own > 0 && of % own == 0);
            if (!fits)
                refuse("input %d, a mask of shape %s, does not fit the scores [%lldx%dx%lldx%lld]", input, mask.text().c_str(), static_cast<long long>(batch), heads_, static_cast<long long>(rows), static_cast<long long>(keys));
        }
    }

    static OnnxfuseAttentionTensor strided(std::vector<int32_t> const& perm, int64_t heads, int64_t rows, int64_t size)
    {
        return rows_first(perm) ? OnnxfuseAttentionTensor{nullptr, rows * heads * size, heads * size, size}
                                : OnnxfuseAttentionTensor{nullptr, rows * heads * size, size, rows * size};
    }
    static OnnxfuseAttentionMask masked(nvinfer1::Dims const& dims)
    {
        auto const strides = broadcast_strides(dims);
        int64_t const batch = dims.nbDims == 4 ? std::max<int64_t>(dims.d[0], 1) : 1;
        return {nullptr, extent(batch, "the batch of a mask"), static_cast<int32_t>(strides[3]), strides[0], strides[1], strides[2]};
    }

    float scale_, fill_;
    int32_t heads_, kv_heads_, packed_, added_, kept_, hides_, safe_, causal_;
    std::vector<int32_t> widths_;
    std::vector<int32_t> q_perm_, k_perm_, v_perm_, y_perm_;
};

static Registration<FusedAttention> const registration;
} // namespace onnxfuse
