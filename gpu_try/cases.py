STEPS, GRID, INDEPENDENT, CLUSTER, RESIDENT = 1, 2, 3, 4, 5
def HOST_CASES(case):
    out = []
    for cell in (0, 1, 2):
        for v in (STEPS, GRID):
            for dt in ("float32", "float16", "bfloat16"):
                out.append(case(f"cell{cell} variant{v} {dt} H24", cell, dt, T=3, B=2, I=20, H=24, variant=v))
            out.append(case(f"cell{cell} variant{v} all options", cell, "float32", T=5, B=9, I=16, H=16, D=2, init=True, lens=True, clip=0.4, batch_first=True, layers=2, variant=v))
            out.append(case(f"cell{cell} variant{v} reverse one row", cell, "float16", T=4, B=1, I=7, H=40, mask=1, bias=False, variant=v))
    for cell in (0, 1):
        for rows in (1, 2, 4):
            out.append(case(f"cell{cell} independent H128 rows{rows}", cell, T=4, B=5, I=64, H=128, D=2, variant=INDEPENDENT, rows=rows))
            out.append(case(f"cell{cell} independent H104 rows{rows} all", cell, "bfloat16", T=5, B=5, I=24, H=104, D=2, init=True, lens=True, clip=0.4, batch_first=True, layers=2, variant=INDEPENDENT, rows=rows))
        for rows in (1, 8):
            out.append(case(f"cell{cell} independent H64 rows{rows}", cell, T=4, B=9, I=64, H=64, D=2, init=True, lens=True, variant=INDEPENDENT, rows=rows))
            out.append(case(f"cell{cell} independent H24 rows{rows}", cell, T=4, B=3, I=8, H=24, D=1, mask=1, init=True, variant=INDEPENDENT, rows=rows))
        for rows in (1, 8):
            out.append(case(f"cell{cell} cluster8 H256 rows{rows}", cell, T=4, B=3, I=64, H=256, variant=CLUSTER, rows=rows, cluster=8))
            out.append(case(f"cell{cell} cluster8 H72 rows{rows} all", cell, "bfloat16", T=5, B=10, I=24, H=72, D=2, init=True, lens=True, clip=0.4, batch_first=True, layers=2, variant=CLUSTER, rows=rows, cluster=8))
            out.append(case(f"cell{cell} wavefront H72 rows{rows}", cell, T=5, B=1, I=24, H=72, layers=2, variant=CLUSTER, rows=rows, cluster=8))
            out.append(case(f"cell{cell} wavefront 3 layers H136 rows{rows} all", cell, T=5, B=2 if rows == 1 else 11, I=24, H=136, mask=1, init=True, lens=True, layers=3, variant=CLUSTER, rows=rows, cluster=8))
        out.append(case(f"cell{cell} resident H24", cell, T=4, B=1, I=24, H=24, variant=RESIDENT))
        out.append(case(f"cell{cell} resident H72 all", cell, "bfloat16", T=4, B=19, I=24, H=72, D=2, init=True, lens=True, clip=0.4, batch_first=True, layers=2, variant=RESIDENT))
        out.append(case(f"cell{cell} resident H264", cell, T=3, B=9, I=24, H=264, variant=RESIDENT, mask=1))
        out.append(case(f"cell{cell} resident H520", cell, T=3, B=2, I=24, H=520, variant=RESIDENT))
        out.append(case(f"cell{cell} cluster16 H512", cell, T=3, B=1, I=64, H=512, variant=CLUSTER))
        out.append(case(f"cell{cell} cluster16 H400 rows8", cell, T=3, B=9, I=64, H=400, variant=CLUSTER, init=True))
    return out
def GPU_CASES(case):
    out = []
    a = lambda *r, **k: out.append(case(*r, **k))
    # --- the three models -------------------------------------------------------------------------------------------------
    lstm = dict(T=100, B=1, H=512, layers=2)
    a("lstm 2x512 t100 b1: auto (wavefront, cooperative)", **lstm)
    a("lstm 2x512 t100 b1: fast", fast=1, **lstm)
    a("lstm 2x512 t100 b1: wavefront, not cooperative, early start", serial=2, **lstm)
    a("lstm 2x512 t100 b1: wavefront, not cooperative, early start, fast", serial=2, fast=1, **lstm)
    a("lstm 2x512 t100 b1: layer by layer", wavefront=1, **lstm)
    a("lstm 2x512 t100 b1: layer by layer, serial", wavefront=1, serial=1, **lstm)
    a("lstm 2x512 t100 b1: grid", variant=GRID, **lstm)
    a("lstm 2x512 t100 b1: steps", variant=STEPS, **lstm)
    a("lstm 2x512 t50 b1: auto (slope)", **{**lstm, "T": 50})
    bi = dict(T=60, B=32, H=128, I=128, D=2, layers=2, batch_first=True)
    for rows in (1, 2, 4):
        a(f"bilstm 2x128 t60 b32: {rows} rows", rows=rows, **bi)
        a(f"bilstm 2x128 t60 b32: {rows} rows, fast", rows=rows, fast=1, **bi)
    a("bilstm 2x128 t60 b32: 1 row, serial", rows=1, serial=1, **bi)
    a("bilstm 2x128 t60 b32: grid", variant=GRID, **bi)
    a("bilstm 2x128 t60 b32: steps", variant=STEPS, **bi)
    gru = dict(cell=1, T=200, B=1, H=256)
    for cl in (8, 16):
        a(f"gru 1x256 t200 b1: cluster of {cl}", cluster=cl, **gru)
        a(f"gru 1x256 t200 b1: cluster of {cl}, fast", cluster=cl, fast=1, **gru)
    a("gru 1x256 t200 b1: cluster of 16, serial", cluster=16, serial=1, **gru)
    a("gru 1x256 t200 b1: grid", variant=GRID, **gru)
    a("gru 1x256 t200 b1: steps", variant=STEPS, **gru)
    # --- other sizes -----------------------------------------------------------------------------------------------------
    a("lstm 2x512 t100 b1: resident", variant=RESIDENT, **lstm)
    a("gru 1x256 t200 b1: resident", variant=RESIDENT, **gru)
    a("bilstm 2x128 t60 b32: resident", variant=RESIDENT, **bi)
    for B in (8, 64):
        big = dict(T=40, B=B, H=512, layers=2)
        for v in (CLUSTER, RESIDENT):
            a(f"lstm 2x512 t40 b{B}: variant {v}", variant=v, **big)
        if B == 8: a(f"lstm 2x512 t40 b{B}: layer by layer", variant=CLUSTER, wavefront=1, **big)
        a(f"gru 1x256 t40 b{B}: cluster", cell=1, T=40, B=B, H=256)
        a(f"gru 1x256 t40 b{B}: resident", cell=1, T=40, B=B, H=256, variant=RESIDENT)
    for B in (1, 8, 64):
        big = dict(T=20, B=B, H=1024, I=512)
        a(f"lstm 1x1024 t20 b{B}: resident", variant=RESIDENT, **big)
        if B < 64: a(f"lstm 1x1024 t20 b{B}: grid", variant=GRID, **big)
    a("bilstm 1x1024 t20 b8: resident", T=20, B=8, H=1024, I=64, D=2, variant=RESIDENT)
    a("lstm 1x512 t100 b1: auto, fast", T=100, B=1, H=512, fast=1)
    a("lstm 1x512 t200 b1: auto, fast", T=200, B=1, H=512, fast=1)
    a("gru 1x256 t400 b1: cluster of 16, fast", cell=1, T=400, B=1, H=256, fast=1)
    a("lstm 1x128 t400 b1: fast", T=400, B=1, H=128, fast=1)
    a("lstm 2x512 t80 b8: cluster, fast", T=80, B=8, H=512, layers=2, variant=CLUSTER, fast=1)
    a("lstm 1x512 t40 b56: cluster, fast", T=40, B=56, H=512, variant=CLUSTER, fast=1)
    a("lstm 3x512 t40 b1: auto", T=40, B=1, H=512, layers=3)
    a("lstm 4x256 t40 b1: auto", T=40, B=1, H=256, layers=4)
    a("lstm 4x256 t40 b1: cluster of 8", T=40, B=1, H=256, layers=4, cluster=8)
    a("lstm 1x64 t200 b1: auto", T=200, B=1, H=64, I=64)
    a("lstm 1x128 t200 b1: auto", T=200, B=1, H=128)
    a("lstm 1x128 t200 b1: cluster of 8", T=200, B=1, H=128, variant=CLUSTER, cluster=8)
    a("lstm 1x128 t200 b8: auto", T=200, B=8, H=128)
    # --- options: correctness -----------------------------------------------------------------------------------------------
    for cell in (0, 1):
        for dt in ("float16", "bfloat16"):
            every = dict(cell=cell, dtype=dt, init=True, lens=True, clip=0.7, batch_first=True, D=2, time=False)
            a(f"cell{cell} {dt} independent, all options", T=33, B=13, I=40, H=104, layers=2, **every)
            a(f"cell{cell} {dt} independent 64, all options", T=33, B=13, I=40, H=48, layers=2, **every)
            a(f"cell{cell} {dt} cluster 8, all options", T=33, B=13, I=40, H=200, layers=2, **every)
            a(f"cell{cell} {dt} cluster 16, all options", T=33, B=13, I=40, H=392, layers=2, **every)
            a(f"cell{cell} {dt} resident, all options", T=33, B=13, I=40, H=392, layers=2, variant=RESIDENT, **every)
        wave = dict(cell=cell, init=True, lens=True, clip=0.7, mask=1, layers=3, time=False)
        a(f"cell{cell} wavefront, reverse, all options, b2", T=33, B=2, I=40, H=200, **wave)
        a(f"cell{cell} wavefront, reverse, all options, b13", T=33, B=13, I=40, H=200, **wave)
        a(f"cell{cell} wavefront, odd width", T=9, B=1, I=37, H=136, layers=2, cell=cell, time=False)
    for cell in (0, 1, 2):
        for v in (STEPS, GRID):
            a(f"cell{cell} float32 variant {v}, all options", cell=cell, dtype="float32", init=True, lens=True, clip=0.7, batch_first=True, D=2, T=20, B=13, I=37, H=200, layers=2, variant=v)
        a(f"cell{cell} float32 t100 b1 h512", cell=cell, dtype="float32", T=100, B=1, H=512)
    # --- long, with larger weights --------------------------------------------------------------------------------------------
    for cell in (0, 1):
        a(f"cell{cell} 1000 steps h256 weights x3", cell=cell, T=1000, B=1, H=256, trained=3.0)
        a(f"cell{cell} 1000 steps h256 weights x3, fast", cell=cell, T=1000, B=1, H=256, trained=3.0, fast=1)
        a(f"cell{cell} 1000 steps h256 weights x3, grid (h float32)", cell=cell, T=1000, B=1, H=256, trained=3.0, variant=GRID, time=False)
        a(f"cell{cell} 1000 steps h128 weights x3 b4, fast", cell=cell, T=1000, B=4, H=128, trained=3.0, fast=1)
        a(f"cell{cell} 1000 steps h256 weights x8, fast", cell=cell, T=1000, B=1, H=256, trained=8.0, fast=1)
        a(f"cell{cell} 1000 steps h256 weights x8", cell=cell, T=1000, B=1, H=256, trained=8.0)
        a(f"cell{cell} 1000 steps h128 weights x3 b4", cell=cell, T=1000, B=4, H=128, trained=3.0)
    return out
