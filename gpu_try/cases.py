def HOST_CASES(t):
    out = []; d, g, l = (lambda *a, **k: out.append(t.depthwise(*a, **k))), (lambda *a, **k: out.append(t.groupnorm(*a, **k))), (lambda *a, **k: out.append(t.linear(*a, **k)))
    for dt in ("float16", "bfloat16", "float32"):
        for K in (3, 5, 7): d(f"dw {dt} {K}", dt, N=2, H=9, W=10, C=24, K=K, variant=1, rows=3, strips=1)
        d(f"dw {dt} planar", dt, N=2, H=9, W=10, C=24, planar=1, rows=2)
        d(f"dw {dt} planar C32", dt, N=1, H=5, W=10, C=32, planar=1, rows=2, strips=2)
        d(f"dw {dt} cluster", dt, N=2, H=7, W=7, C=64, split=4, rows=7)
        d(f"dw {dt} cluster planar", dt, N=1, H=7, W=8, C=64, split=2, rows=2, planar=1)
        d(f"dw {dt} cluster, many units", dt, N=1, H=10, W=7, C=256, split=2, rows=10)
        d(f"dw {dt} plain", dt, N=1, H=7, W=7, C=40, bias=False, affine=False)
        d(f"dw {dt} large mean", dt, N=1, H=8, W=9, C=64, offset=30.0, split=2)
        g(f"gnb {dt}", dt, N=2, C=40, G=4, HW=64, bulk=1)
        g(f"gnb {dt} film cluster", dt, N=2, C=64, G=8, HW=96, film=1, threads=64, split=4, bulk=1)
        g(f"gnb {dt} uneven", dt, N=1, C=48, G=2, HW=24, silu=0, threads=32, split=8, bulk=1, offset=10.0)
        for last in (0, 1):
            g(f"gn {dt} last{last}", dt, N=2, C=40, G=4, HW=64, last=last)
            g(f"gn {dt} last{last} per8", dt, N=1, C=64, G=8, HW=160, last=last, threads=32, per=8, split=1)
            g(f"gn {dt} last{last} film cluster", dt, N=2, C=64, G=8, HW=96, last=last, film=1, threads=64, split=4)
            g(f"gn {dt} last{last} odd cluster", dt, N=2, C=48, G=4, HW=37, last=last, film=1, threads=64, split=2)
            g(f"gn {dt} last{last} uneven cluster 16", dt, N=1, C=64, G=2, HW=147, last=last, silu=0, threads=32, split=16)
            g(f"gn {dt} last{last} two kernels", dt, N=2, C=64, G=4, HW=300, last=last, film=1, threads=64, split=20, two=1)
            g(f"gn {dt} last{last} large mean", dt, N=1, C=32, G=2, HW=144, last=last, silu=0, offset=30.0, affine=False)
            g(f"gn {dt} last{last} one pixel a group", dt, N=2, C=32, G=4, HW=1, last=last)
    for dt in ("float16", "bfloat16"):
        for rows in (1, 2, 4):
            for planar in (0, 1):
                d(f"dwb {dt} rows{rows} planar{planar}", dt, N=2, H=9, W=10, C=24, variant=5, rows=rows, strips=2, planar=planar)
                d(f"dwb {dt} rows{rows} planar{planar} two images", dt, N=3, H=7, W=7, C=64, variant=5, rows=rows, strips=1, strip=2, split=2, planar=planar)
            d(f"dwb {dt} rows{rows} wide", dt, N=1, H=9, W=60, C=32, variant=5, rows=rows, strips=7)
            d(f"dwb {dt} rows{rows} cluster 3", dt, N=1, H=14, W=28, C=96, variant=5, rows=rows, strips=4, split=3, offset=30.0)
            d(f"dwb {dt} rows{rows} plain", dt, N=1, H=15, W=17, C=48, variant=5, rows=rows, strips=3, bias=False, affine=False)
            d(f"dwb {dt} rows{rows} low", dt, N=1, H=2, W=3, C=8, variant=5, rows=rows, strips=8)
        for K in (3, 5): d(f"dwb {dt} kernel {K}", dt, N=2, H=14, W=15, C=64, K=K, variant=5, rows=2, strips=2, split=4)
        d(f"dwb {dt} cluster 16", dt, N=1, H=7, W=7, C=128, variant=5, rows=1, strips=1, split=16)
        for K, N, H, W, C in ((7, 1, 56, 56, 96), (7, 3, 7, 7, 256), (3, 1, 20, 20, 40), (5, 2, 9, 31, 64)): d(f"dw {dt} as chosen", dt, N=N, H=H, W=W, C=C, K=K)
        for rows, columns in ((32, 64), (64, 64), (64, 128), (128, 128)):
            l(f"linear {dt}", dt, M=49, K=96, N=136, act="gelu", rows=rows, columns=columns)
            l(f"linear {dt} all", dt, M=130, K=200, N=72, act="silu", scale=True, residual=True, rows=rows, columns=columns, split=2, stages=2)
            l(f"linear {dt} deep, more blocks than steps", dt, M=33, K=328, N=64, rows=rows, columns=columns, split=8, stages=3, residual=True)
            l(f"linear {dt} plane", dt, M=98, K=72, N=72, plane=49, scale=True, residual=True, rows=rows, columns=columns, split=4)
        for columns in (64,):
            for split in (1, 2, 4, 8):
                l(f"group {dt}", dt, M=100, K=136, N=136, act="gelu", rows=64, columns=columns, hopper=1, split=split)
                l(f"group {dt} deep", dt, M=49, K=1096, N=72, scale=True, residual=True, rows=64, columns=columns, hopper=1, split=split)
        for columns in (128, 256):
            l(f"hopper {dt}", dt, M=130, K=136, N=264, act="gelu", columns=columns, hopper=1)
            l(f"hopper {dt} all", dt, M=300, K=456, N=136, act="silu", scale=True, residual=True, columns=columns, hopper=1)
        for act in ("none", "relu", "gelu_tanh", "gelu_quick"): l(f"linear {dt} {act}", dt, M=20, K=64, N=64, act=act, bias=act != "none")
        l(f"linear {dt} plane, one block", dt, M=98, K=264, N=40, plane=49, act="gelu", bias=False)
    return out
def GPU_CASES(t):
    out = []; d, g, l = (lambda *a, **k: out.append(t.depthwise(*a, **k))), (lambda *a, **k: out.append(t.groupnorm(*a, **k))), (lambda *a, **k: out.append(t.linear(*a, **k)))
    def copy(m):
        r = {}
        for mb in (1, 8, 64, 512):
            n = mb << 20; ps = [t.Copy(m.alloc(n), m.alloc(n), n) for _ in range(max(1, min(16, 80 // mb)))]
            for p in ps: m.poison(p.from_, n)
            for name, kind in (("kernel", t.COPY), ("memcpy", t.MEMCPY)): r[f"{name}_{mb}mb"] = dict(warm=m.time(kind, ps[:1], 0, 10 if mb < 512 else 2, 15, False), cold=m.time(kind, ps, 0, len(ps), 9, True))
            m.free()
        r["gbps"] = {n: round(2 * (int(n.split("_")[1][:-2]) << 20) / v["cold"][0] / 1e3) for n, v in r.items()}; r["nothing"] = m.time(t.NOTHING, [t.Copy()], 0, 20, 15, False); print_ = None
        return r
    out.append(dict(kind=t.COPY, name="copy bandwidth", measure=copy, time=True))
    stages = ((56, 96), (28, 192), (14, 384), (7, 768))
    # variant, rows, strip, strips, split
    depthwise_1 = {56: ((5, 1, 1, 7, 3), (5, 1, 1, 4, 3), (5, 1, 1, 2, 3)),
        28: ((5, 1, 1, 4, 6), (5, 1, 1, 4, 4), (5, 1, 1, 4, 3), (5, 1, 1, 2, 3), (5, 1, 1, 2, 6), (5, 2, 1, 4, 6)),
        14: ((5, 1, 1, 2, 6), (5, 1, 1, 2, 8), (5, 1, 1, 2, 12), (5, 2, 1, 2, 8), (5, 2, 1, 2, 6), (5, 1, 1, 1, 8)),
        7: ((5, 1, 1, 1, 8), (5, 1, 1, 1, 12), (5, 1, 1, 1, 16), (5, 1, 1, 1, 6))}
    depthwise_many = {56: ((5, 4, 1, 7, 3), (5, 2, 1, 7, 3), (5, 4, 1, 7, 2), (5, 2, 1, 7, 2), (5, 4, 1, 4, 3), (5, 2, 1, 4, 3), (5, 4, 1, 4, 1), (5, 2, 1, 4, 1), (1, 4, 1, 2, 1)),
        28: ((5, 4, 1, 4, 6), (5, 2, 1, 4, 6), (5, 2, 1, 4, 3), (5, 4, 1, 4, 3), (5, 4, 1, 2, 3), (5, 1, 1, 4, 6)), 14: ((5, 2, 1, 2, 6), (5, 2, 1, 2, 8), (5, 1, 1, 2, 6), (5, 2, 1, 2, 4), (5, 1, 1, 2, 4)), 7: ((5, 1, 2, 1, 8), (5, 1, 2, 1, 12), (5, 1, 1, 1, 8), (5, 2, 2, 1, 8), (5, 1, 2, 1, 6))}
    # tile rows and columns, stages, split, hopper
    linear_1 = {(H, fc): [(64, 64, 0, split, 1) for split in splits] for (H, fc), splits in {(56, "fc1"): (1,), (56, "fc2"): (1, 2), (28, "fc1"): (1, 2), (28, "fc2"): (1, 2, 4), (14, "fc1"): (1, 2), (14, "fc2"): (2, 4, 8), (7, "fc1"): (1, 2, 4), (7, "fc2"): (4, 8)}.items()}
    names_1 = ("tile_rows", "tile_columns", "stages", "split", "hopper")
    linears = lambda C: (("fc1", dict(K=C, N=4 * C, act="gelu")), ("fc2", dict(K=4 * C, N=C, scale=True, residual=True)))

    def chain(m):
        """All 18 blocks of ConvNeXt-tiny at batch 1, 54 kernels with their own weights: one after the other, and each started early."""
        rng = t.np.random.default_rng(1); f16 = lambda *n, s=1.0: m.put((rng.standard_normal(n, dtype=t.np.float32) * s).astype(t.np.float16)); links = []; best = {}; outs = []
        for (H, C), depth in zip(stages, (3, 3, 9, 3)):
            M = H * H; x = f16(M, C); t1, t2, x2 = m.alloc(M * C * 2), m.alloc(M * C * 8), m.alloc(M * C * 2); host = {n: (rng.standard_normal(n, dtype=t.np.float32) * s).astype(t.np.float16) for n, s in (((49, C), 1 / 7), ((C, 4 * C), C ** -0.5), ((4 * C, C), (4 * C) ** -0.5))}; vec = f16(4 * C, s=0.3)
            def tuned(kind, p, names, tactics):
                times = []
                for tac in tactics:
                    for n, v in zip(names, tac): setattr(p, n, v)
                    try: times.append((m.time(kind, [p], 0, 10, 5, False)[0], tac))
                    except RuntimeError: m.lib.gt_sync()
                us, tac = min(times)
                for n, v in zip(names, tac): setattr(p, n, v)
                best[f"{H} {('dw', '', 'linear')[kind]} {p.width if kind == t.LINEAR else ''}"] = (us, tac); return p
            d0 = f0 = g0 = None
            for b in range(depth):
                w, w1, w2 = (m.put(a) for a in host.values())
                a = t.Depthwise(dtype=1, kernel=7, images=1, height=H, width=H, channels=C, epsilon=1e-6, input=x, weight=w, bias=vec, gamma=vec, beta=vec, output=t1)
                e = t.Linear(dtype=1, activation=3, rows=M, width=C, columns=4 * C, input=t1, weight=w1, bias=vec, output=t2)
                f = t.Linear(dtype=1, rows=M, width=4 * C, columns=C, input=t2, weight=w2, bias=vec, scale=vec, residual=x, output=x2)
                if b == 0: tuned(t.DEPTHWISE, a, ("variant", "rows", "strip", "strips", "split"), depthwise_1[H]); tuned(t.LINEAR, e, names_1, linear_1[H, "fc1"]); tuned(t.LINEAR, f, names_1, linear_1[H, "fc2"]); first = (a, e, f)
                else:
                    for p, q, names in ((a, first[0], ("variant", "rows", "strip", "strips", "split")), (e, first[1], names_1), (f, first[2], names_1)):
                        for n in names: setattr(p, n, getattr(q, n))
                links += [(t.DEPTHWISE, a), (t.LINEAR, e), (t.LINEAR, f)]; x, x2 = x2, (m.alloc(M * C * 2) if b == 0 else x)
            outs.append((x, M * C))
        r = {"best": best, "sum_of_best_us": round(sum(us * {56: 3, 28: 3, 14: 9, 7: 3}[int(n.split()[0])] for n, (us, _) in best.items()), 1)}
        table = (t.Link * (len(links) + 1))(*[t.Link(kind, t.ctypes.addressof(p)) for kind, p in links]); n = 0
        got = []
        for early in (0, 1):
            for _, p in links: p.early = early
            us = m.time(t.CHAIN, [head_of(t, table)], 0, 1, 30, False); r["early" if early else "in turn"] = us
            got.append([m.get(d, t.np.empty(k, t.np.float16)).tobytes() for d, k in outs])
        for _, p in links: # as the launchers choose
            for n in ("variant", "rows", "strip", "strips", "split") if isinstance(p, t.Depthwise) else names_1: setattr(p, n, 0)
        try: r["early, as chosen"] = m.time(t.CHAIN, [head_of(t, table)], 0, 1, 30, False)
        except RuntimeError as e: r["as chosen"] = str(e); m.lib.gt_sync()
        for _, p in links:
            tac = best[f"{p.height} dw "][1] if isinstance(p, t.Depthwise) else best[f"{int(p.rows ** 0.5)} linear {p.width}"][1]
            for n, v in zip(("variant", "rows", "strip", "strips", "split") if isinstance(p, t.Depthwise) else names_1, tac): setattr(p, n, v)
        per = {}
        for early in (0, 1):
            for _, p in links: p.early = early
            for i, (H, d) in enumerate(((56, 3), (28, 3), (14, 9), (7, 3))):
                start = 3 * sum((3, 3, 9, 3)[:i]); part = (t.Link * (3 * d + 1))(*[t.Link(kind, t.ctypes.addressof(p)) for kind, p in links[start:start + 3 * d]]); per[f"{H} {'early' if early else 'in turn'}"] = round(m.time(t.CHAIN, [head_of(t, part)], 0, 1, 20, False)[0] / d, 2)
        r["us_a_block"] = per; r["same"] = got[0] == got[1]; r["finite"] = all(bool(t.np.isfinite(t.np.frombuffer(b, t.np.float16)).all()) for b in got[0]); m.free(); return r
    out.append(dict(kind=t.CHAIN, name="convnext_tiny, its 18 blocks", measure=chain, time=True))

    def phases(m):
        """Clock cycles from a block's start to each of its stamps: median and largest over the blocks, and the spread of the starts."""
        lib = t.Gpu("_stamps"); r = {}
        jobs = [(t.depthwise(f"dw {H} {tac}", H=H, C=C, **dict(zip(("variant", "rows", "strip", "strips", "split"), tac))), "depthwise") for H, C in stages for tac in depthwise_1[H][:2]]
        jobs += [(t.depthwise(f"dw b32 {H} {tac}", N=32, H=H, C=C, **dict(zip(("variant", "rows", "strip", "strips", "split"), tac))), "depthwise") for H, C in stages for tac in depthwise_many[H][:1]]
        jobs += [(t.linear("fc1 56", M=3136, K=96, N=384, act="gelu", rows=64, columns=64, hopper=1, split=1), "linear"), (t.linear("fc1 14", M=196, K=384, N=1536, act="gelu", rows=64, columns=64, hopper=1, split=1), "linear"), (t.linear("fc2 14", M=196, K=1536, N=384, scale=True, residual=True, rows=64, columns=64, hopper=1, split=4), "linear"), (t.linear("fc2 7", M=49, K=3072, N=768, scale=True, residual=True, rows=64, columns=64, hopper=1, split=8), "linear")]
        for k, which in jobs:
            problems, _, _, _ = t.build(k, lib, 1); n = 4096 * 16 * 8; d = lib.alloc(n); lib.poison(d, n); lib.ok(getattr(lib.lib, f"onnxfuse_stamps_{which}")(t.P(d)), "stamps")
            for _ in range(3): lib.launch(k["kind"], problems[0], 0)
            a = lib.get(d, t.np.empty((4096, 16), t.np.int64)); lib.ok(getattr(lib.lib, f"onnxfuse_stamps_{which}")(None), "stamps"); a = a[a[:, 0] != -1]; b = t.np.where(a == -1, 0, a - a[:, :1])
            r[k["name"]] = dict(blocks=int(len(a)), median=t.np.median(b, 0).astype(int).tolist()[:8], largest=b.max(0).tolist()[:8]); lib.free()
        return r
    out.append(dict(kind=t.CHAIN, name="phases", measure=phases, time=True))
    # --- all types, odd sizes ----------------------------------------------------------------------------------------------------
    for dt in ("bfloat16", "float32"):
        d(f"dw b2 {dt} planar", dt, N=2, H=29, W=31, C=96, planar=1, rows=4, time=False); d(f"dw b1 {dt} cluster", dt, H=15, C=768, rows=2, split=8, time=False)
        for last in (0, 1): g(f"gn {dt} last{last}", dt, N=2, C=320, HW=1024, last=last, film=1, split=4, time=False); g(f"gn {dt} last{last} odd", dt, N=2, C=96, HW=1023, last=last, film=1, time=False)
    l("linear bf16 all", "bfloat16", M=197, K=776, N=776, act="gelu", scale=True, residual=True, split=4, rows=64, columns=64, time=False); l("linear plane", M=196, K=1536, N=384, plane=196, scale=True, residual=True, split=4); l("linear plane, one block", M=3136, K=384, N=96, plane=3136, scale=True, residual=True)
    for H, C in stages:
        for v, rows, strip, strips, split in depthwise_1[H]: d(f"dw b1 {H}x{H}x{C}", H=H, C=C, rows=rows, split=split, strip=strip, strips=strips, variant=v)
        d(f"dw b1 planar {H}x{H}x{C}", H=H, C=C, planar=1)
    for H, C in stages:
        for fc, kw in linears(C):
            for rows, columns, stg, split, hopper in linear_1[H, fc]: l(f"{fc} b1 {H * H}x{kw['K']}x{kw['N']}", M=H * H, rows=rows, columns=columns, stages=stg, split=split, hopper=hopper, **kw)
    # --- larger batches ----------------------------------------------------------------------------------------------------------
    for N in (32, 8):
        for H, C in stages:
            for v, rows, strip, strips, split in depthwise_many[H]: d(f"dw b{N} {H}x{H}x{C}", N=N, H=H, C=C, rows=rows, split=split, strip=strip, strips=strips, variant=v)
            d(f"dw b{N} as chosen {H}x{H}x{C}", N=N, H=H, C=C)
        for H, C in stages:
            for fc, kw in linears(C):
                for rows, columns in ((0, 128), (0, 256), (64, 64)):
                    if columns <= kw["N"]: l(f"{fc} b{N} {N * H * H}x{kw['K']}x{kw['N']}", M=N * H * H, rows=rows, columns=columns, hopper=1, **kw)
    for columns in (256, 128): l("linear 4096^3", M=4096, K=4096, N=4096, act="gelu", columns=columns, hopper=1); l("linear 4096^3", M=4096, K=4096, N=4096, bias=False, columns=columns, hopper=1)
    # --- other kernels and types -------------------------------------------------------------------------------------------------
    for K in (3, 5): d(f"dw kernel {K}", N=4, H=28, C=192, K=K)
    for dt in ("bfloat16",): d(f"dw b32 {dt}", dt, N=32, H=14, C=384); d(f"dw b1 {dt}", dt, H=14, C=384); l(f"fc1 {dt}", dt, M=196, K=384, N=1536, act="gelu"); l(f"fc2 {dt}", dt, M=196, K=1536, N=384, scale=True, residual=True)
    d("dw b8 float32", "float32", N=8, H=28, C=192)
    # --- GroupNorm -------------------------------------------------------------------------------------------------------------
    for N, C, HW, tactics in ((8, 320, 4096, ((512, 1, 1, 0), (256, 2, 1, 0), (0, 0, 0, 0))), (16, 512, 4096, ((512, 2, 1, 0), (256, 4, 1, 0), (0, 0, 0, 0))), (1, 128, 262144, ((512, 16, 1, 0), (256, 32, 0, 1), (512, 64, 0, 1), (0, 0, 0, 0))), (2, 512, 65536, ((512, 16, 1, 0), (256, 8, 0, 1), (512, 32, 0, 1), (0, 0, 0, 0)))):
        for th, split, bulk, two in tactics: g(f"gn {N}x{C}x{HW}", N=N, C=C, HW=HW, threads=th, split=split, bulk=bulk, two=two)
    return out


def head_of(t, table):
    """A problem that is the table itself: gt_time copies one problem's bytes, so give it all links in one structure."""
    class Links(t.ctypes.Structure): _fields_ = [("links", t.Link * len(table))]
    return Links.from_buffer(table)
