// Prints, for each "rows width vector sms wanted" on stdin, the row geometry and the column geometry that the launchers would use:
// "threads per_thread rows_per_block blocks | threads_x threads_y rows_each blocks_x blocks_y".
#include <cstdio>

#include "../../plugins/common/geometry.h"

int main()
{
    long long rows, width;
    int vector, sms, wanted;
    while (std::scanf("%lld %lld %d %d %d", &rows, &width, &vector, &sms, &wanted) == 5)
    {
        onnxfuse::RowGeometry const r = onnxfuse::row_geometry(rows, static_cast<int>(width), vector, sms, wanted);
        onnxfuse::ColumnGeometry const c = onnxfuse::column_geometry(rows, width, vector, sms);
        std::printf("%d %d %d %lld | %d %d %d %lld %lld\n", r.threads, r.per_thread, r.rows_per_block, static_cast<long long>(r.blocks),
            c.threads_x, c.threads_y, c.rows_each, static_cast<long long>(c.blocks_x), static_cast<long long>(c.blocks_y));
    }
}
