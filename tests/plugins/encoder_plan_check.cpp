// For a GPU with so many clusters of 4, 2 and 1 blocks: prints each problem within the fusion's limits that has no plan ("none BxS W F"), or
// whose plan is not of the clusters that are tried first ("other BxS W F"), and then how many there were.
#include <cstdio>
#include <cstdlib>

#include "../../plugins/EncoderLayer/plan.h"

using namespace onnxfuse::encoder;

int main(int, char** argv)
{
    int const clusters[] = {0, std::atoi(argv[3]), std::atoi(argv[2]), 0, std::atoi(argv[1])};
    int count = 0;
    for (int width = 64; width <= 1024; width += 64)
    {
        for (int inner = 64; inner <= 4 * width; inner += inner < 1024 ? 64 : 256)
        {
            for (int sequence : {1, 16, 33, 128, 197, 257, 512})
            {
                for (int batch : {1, 2, 8, 16, 64})
                {
                    if (batch * ceil_of(sequence, 16) * 16 > 8192)
                        continue;
                    ++count;
                    int const first = cluster_for(batch, sequence, width, inner);
                    Plan plan;
                    bool fits = false;
                    for (int cluster = first; cluster > 0 && !fits; cluster /= 2)
                        fits = make_plan(batch, sequence, width, inner, width / 64, cluster, clusters[cluster], kCompiledShared, Wishes{}, plan);
                    if (!fits || plan.cluster != first)
                        std::printf("%s %dx%d %d %d\n", fits ? "other" : "none", batch, sequence, width, inner);
                }
            }
        }
    }
    std::printf("%d\n", count);
    return 0;
}
