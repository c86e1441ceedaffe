// Tactics of a plugin: numbers from 1 that TensorRT tries and tells again; 0 leaves the choice to the launcher.
#pragma once

#include <algorithm>
#include <vector>

#include "plugin.h"

namespace onnxfuse
{
// The numbers of a plugin's tactics.
template <typename Derived>
class Numbered : public Node<Derived>
{
public:
    int32_t getNbTactics() noexcept override
    {
        return static_cast<int32_t>(valid_.size());
    }
    int32_t getValidTactics(int32_t* tactics, int32_t nbTactics) noexcept override
    {
        std::copy_n(valid_.begin(), std::min<size_t>(valid_.size(), static_cast<size_t>(std::max(nbTactics, 0))), tactics);
        return 0;
    }
    int32_t setTactic(int32_t tactic) noexcept override
    {
        tactic_ = tactic;
        return 0;
    }

protected:
    std::vector<int32_t> valid_; // of the shapes last configured
    int32_t tactic_ = 0;
};

// The tensors with one of their shapes: the smallest, the one to be fast for, or the largest.
inline std::vector<nvinfer1::PluginTensorDesc> shaped(
    nvinfer1::DynamicPluginTensorDesc const* in, int32_t count, nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::*which)
{
    std::vector<nvinfer1::PluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i)
    {
        descs.push_back(in[i].desc);
        descs.back().dims = in[i].*which;
    }
    return descs;
}

// Derived of Node also has what the launcher takes: `Problem`, with a field `early` (the kernel may start before the stream's kernel before it
// has ended), and
//   static std::vector<Problem> const& tactics();           how to compute: only the fields of the tactic matter
//   static void use(Problem& problem, Problem const& tactic);
//   static int supported(Problem const& problem);           a cudaError_t, without launching
//   static bool too_short_to_time(Problem const& problem);  optional; see below
//   static int launch(Problem const& problem, void* workspace, cudaStream_t stream);
//   Problem sized(PluginTensorDesc const* inputs) const;     without its tensors
//   void place(Problem& problem, void const* const* inputs, void* const* outputs) const;
template <typename Derived>
class Tuned : public Numbered<Derived>
{
public:
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        return this->status([&] {
            this->self().check(shapes_of(in, nbInputs));
            find_tactics(this->self().sized(shaped(in, nbInputs, &nvinfer1::DynamicPluginTensorDesc::opt).data()));
        });
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override
    {
        return this->status([&] {
            auto problem = this->self().sized(inputDesc);
            this->self().place(problem, inputs, outputs);
            run(problem, workspace, stream);
        });
    }

protected:
    using Numbered<Derived>::valid_;
    using Numbered<Derived>::tactic_;

    // Whether a launch takes the processor longer than the kernel takes the GPU. TensorRT times launches one behind the other, so that
    // all tactics of such a problem take as long for it, and the one that it picks is any: the launcher's own rule knows better.
    template <typename Problem>
    static bool too_short_to_time(Problem const&)
    {
        return false;
    }

    // The tactics that can compute this problem, whose pointers are not looked at; none where the launcher's rule shall decide. Refused
    // where this GPU has none.
    template <typename Problem>
    void find_tactics(Problem problem)
    {
        valid_.clear();
        if (Derived::too_short_to_time(problem) && Derived::supported(problem) == 0)
            return;
        auto const& all = Derived::tactics();
        for (size_t i = 0; i < all.size(); ++i)
        {
            Derived::use(problem, all[i]);
            if (Derived::supported(problem) == 0)
                valid_.push_back(static_cast<int32_t>(i) + 1);
        }
        if (valid_.empty())
            refuse("this GPU has no kernel for these shapes; leave this node to TensorRT");
    }
    // With the tactic that was set; a tactic is chosen for one shape, and where it cannot compute another the launcher chooses.
    template <typename Problem>
    void run(Problem problem, void* workspace, cudaStream_t stream) const
    {
        auto const& all = Derived::tactics();
        Problem chosen = problem;
        if (tactic_ >= 1 && tactic_ <= static_cast<int32_t>(all.size()))
            Derived::use(chosen, all[static_cast<size_t>(tactic_) - 1]);
        if (Derived::supported(chosen) != 0)
            chosen = problem;
        chosen.early = 1; // what is read before the kernel before has ended are constants of the engine
        if (int const failed = Derived::launch(chosen, workspace, stream))
            refuse("the kernel did not start: %s", onnxfuse_launch_error(failed));
    }
};
} // namespace onnxfuse
