"""Faults of the Hopper forward: replacements of text in its source, and the problem, tile and operands that show each.

Each is aimed at one wait, one release, one number or one step of the arithmetic; `test_gluon_simulation.py` asks for them all.
"""

STATIC, DYNAMIC, QUEUE = "128x32 s2 q1 pingpong static", "128x32 s2 q2 pingpong dynamic g1", "128x64 s3 q1 dynamic g1"
LAZY = "128x32 s2 q1 pingpong lazy static"
STEADY, STEADY_SKIPS = LAZY.replace("lazy", "steady"), "128x64 s2 q1 pingpong steady dynamic"
STEADY_THREE = "192x64 s3 q2 steady dynamic g1"
THREE, ONE = "192x64 s2 q2 pingpong static", "64x32 s2 q1 static"
SKIPS, SKIPS_THREE = "128x64 s2 q1 pingpong lazy dynamic", "192x64 s3 q2 lazy dynamic g1"
SKIPS_STATIC, SKIPS_WIDE = "128x64 s3 q2 static", "192x128 s2 q1 lazy dynamic"

CAUSAL, PACKED = "b1 h3 q200 k330 d64 bf16 causal", "b4 h2 q300 k300 d64 bf16 packed causal"
DIAGONAL, SHORT, FEW_KEYS = "b1 h4 q384 k384 d64 bf16 causal", "b1 h8 q700 k60 d64 bf16", "b1 h2 q300 k44 d64 bf16 causal"
NARROW, WIDE = "b1 h1 q99 k99 d64 bf16 window(9,9)", "b1 h1 q300 k300 d64 bf16 window(70,9)"
GROUPED, MANY_KEYS, RAGGED = "b1 h4/2 q70 k70 d64 bf16", "b1 h3 q300 k2048 d64 bf16", "b1 h1 q70 k70 d64 bf16"
SPLIT, HALVES, NEGATIVE = "b1 h1 q100 k100 d96 bf16 causal", "b1 h2 q200 k100 d256 bf16", "b1 h1 q70 k100 d64 bf16 scale=-0.1"
STEEP = "b1 h1 q64 k330 d64 bf16 causal scale=9.0"
BATCHES, UNEVEN = "b3 h2 q130 k130 d64 bf16", "b3 h2 q300 k200 d64 bf16 packed causal"
NAN = "b1 h1 q90 k90 d64 fp16 causal"
NAN_HEADS, NAN_PACKED = "b3 h2 q130 k130 d64 fp16 causal", "b4 h2 q300 k300 d64 fp16 packed causal"
NAN_TILES = "b1 h1 q250 k250 d64 fp16 causal"
WIDE_O = "128x32 s2 q1 static"

FIRST_SLOT, NEXT_SLOT = "    wait_told(slots, round, SLOTS)\n", "            wait_told(slots, round + 1, SLOTS)\n"
FREE_SLOT = "            release_told(slots, round, SLOTS)\n"
FIRST_Q = "        wait_full(q_ring, round, BUILD.Q_STAGES, True, CONSUMER, BUILD.CONSUMERS)\n"
NEXT_Q = "            wait_full(q_ring, round + 1, BUILD.Q_STAGES, turns > 0, CONSUMER, BUILD.CONSUMERS)\n"
FREE_Q = "release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)\n"
LATE_Q = "            if BUILD.Q_STAGES > 1:\n                " + FREE_Q
ONLY_Q = "                if turns - done == 1:\n                    " + FREE_Q
FIRST_K = "        wait_full(k_ring, turn, BUILD.STAGES)\n"
SECOND_K = "        wait_full(k_ring, turn, BUILD.STAGES, left > 0)\n"
LOOP_K = "                wait_full(k_ring, turn + 1, BUILD.STAGES, j + 1 < turns)\n"
NEXT_K = "            wait_full(k_ring, turn, BUILD.STAGES, turns > 0)\n"
UNLESS_SKIPPED = "                wait_full(k_ring, turn + 1, BUILD.STAGES, (left > 0) & (done == 0))\n"
ONE_MORE_K = "                wait_full(k_ring, turn + 1, BUILD.STAGES, left > 0)\n"
BEHIND_SKIP = "place of this one\n    " + ONE_MORE_K
FREE_FIRST_K = "        release(k_ring, turn, BUILD.STAGES)\n"
FREE_K, FREE_V = "        " + FREE_FIRST_K, "                release(v_ring, turn - 1, BUILD.STAGES)\n"
FREE_LAST_V = "                release(v_ring, v_turn, BUILD.STAGES)\n"
FIRST_S = "        s = warpgroup_mma_wait(0, deps=[s])\n"
LOOP, ELSE = "turn, turn - 1, band, buffers, rings, CONSUMER, BUILD\n                )\n", "            else:\n"
LOOP += '                if BUILD.STEADY and (not BUILD.CAP or BUILD.ALIBI != ""):  # capped scores are bounded\n'
LOOP += "                    m, l, alpha = settle(m, l)\n"
WAIT_S = "                s = warpgroup_mma_wait(1, deps=[s])\n"
BOTH = "                s, acc = warpgroup_mma_wait(0, deps=[s, acc])\n"
ACC = "                acc = warpgroup_mma_wait(0, deps=[acc])\n"
CLOSE = "                inverse, far = _close(old_m, old_l,"
LAST_PRODUCTS = "(slots, round, 0), round + 1, turn, v_turn, band, buffers, rings, CONSUMER, BUILD\n"
SKIP_TURN = """            if BUILD.PINGPONG:
                take_turn(CONSUMER)
                give_turn(CONSUMER, BUILD.CONSUMERS)
"""
SKIP_K = "            wait_full(k_ring, turn + i, BUILD.STAGES)\n", "            release(k_ring, turn + i, BUILD.STAGES)\n"
SKIP_V = "            wait_full(v_ring, turn + i, BUILD.STAGES)\n", "            release(v_ring, turn + i, BUILD.STAGES)\n"
TO_FILL, TO_PUBLISH = "phase_of(turn, STAGES) ^ 1)\n    if SECOND", "phase_of(turn, STAGES) ^ 1)\n    zero"
NUMBERS = "turns, row, head, b, flag, start, full, full_end, begin_q, len_q, begin_k, len_k"
EDGES = "(key_tile < first) | (key_tile >= end)"
AT_NEXT = "old_l = l\n                p, m, l, alpha = _softmax(\n                    s, m, l, alpha, slots, round + 1, left,"
VISIBLE = "seen = eights < gl.minimum(end_key(rows, shift, len_k, band), len_k) - own"
FLAG = "flag = (b * heads + head) * gl.cdiv(total_q, ROWS) + row // ROWS"
FLAG_PACKED = "flag = head * (total_q // ROWS + batch) + begin_q // ROWS + sequence + row // ROWS"


def only(old: str, new: str = "", *others: str):
    """Replacements: `old` by `new`, and further pairs."""
    words = (old, new, *others)
    return tuple(zip(words[::2], words[1::2], strict=True))


# name -> (replacements, problem, tile, kind of operands)
# Harmless, and not among them:
# * K behind the first released before its S is awaited: the V of the P V behind it is released later, and fetched again before.
# * The next tile announced earlier or later within its tile: three slots suffice, and nobody waits for it before.
# * Surplus tiles of packed sequences computed all the same: no row of theirs is stored.
# * Full tiles masked all the same, and key tiles skipped by a consumer's first row: its 64 rows end in one key tile.
MUTANTS = {
    # the producer and the rings
    "wrong phase": (only(TO_FILL, TO_FILL.replace(" ^ 1", "")), CAUSAL, STATIC),
    "the phase never turns": (only("turn // STAGES & 1", "turn * 0"), CAUSAL, STATIC),
    "no empty buffer awaited": (only("    mbarrier.wait(empty.index(i), " + TO_FILL, "    if SECOND"), CAUSAL, STATIC),
    "too few K/V fetched": (only("for j in range(turns):", "for j in range(turns - 1):"), CAUSAL, STATIC),
    "too many K/V fetched": (only("for j in range(turns):", "for j in range(turns + 1):"), CAUSAL, STATIC),
    "a key tile lost": (only("start, BUILD.BLOCK_N), 1)", "start, BUILD.BLOCK_N) - 1, 1)"), CAUSAL, STATIC),
    "the second part from the start": (only("[b, row, head, SECOND]", "[b, row, head, 0]"), SPLIT, STATIC),
    "bytes of the first part alone": (only(".nbytes + second_source.block_type.nbytes", ".nbytes"), SPLIT, STATIC),
    "Q of one consumer for all": (only("first + c * ROWS, head, round", "first, head, round"), CAUSAL, STATIC),
    "key tiles from the first on": (only("key_tile_start(turns - 1 - j, start", "key_tile_start(j, start"), CAUSAL, STATIC),
    # Q
    "no wait for the first Q": (only(FIRST_Q), CAUSAL, STATIC),
    "no wait for the next Q": (only(NEXT_Q), CAUSAL, STATIC),
    "Q of no tile awaited": (only(NEXT_Q, NEXT_Q.replace("turns > 0", "True")), CAUSAL, STATIC),
    "Q never released": (only("if j + 1 == turns:", "if j + 1 < 0:"), CAUSAL, STATIC),
    "two Q never released": (only(LATE_Q), CAUSAL, DYNAMIC),
    "Q of one key tile never released": (only(ONLY_Q, "                pass\n"), SHORT, "128x64 s2 q1 static"),
    "Q of one key tile behind skipped ones never released": (only("turns - done == 1:", "turns == 1:"), DIAGONAL, SKIPS),
    "Q released twice": (only(LATE_Q, "            if True:\n                " + FREE_Q), CAUSAL, STATIC),
    "Q released a turn too early": (only("if j + 1 == turns:", "if j + 2 == turns:"), CAUSAL, STATIC),
    "Q released before its last S": (
        only(
            LOOP + WAIT_S,
            LOOP + "                if j + 1 == turns:\n                    " + FREE_Q + WAIT_S,
            "                    if j + 1 == turns:\n                        " + FREE_Q,
            "                    pass\n",
        ),
        CAUSAL,
        STATIC,
    ),
    # K
    "no wait for the first K": (only(FIRST_K + "        if", "        if"), CAUSAL, STATIC),
    "no wait for the second K": (only(SECOND_K + "        while", "        while"), CAUSAL, STATIC),
    "no wait for K": (only(LOOP_K), CAUSAL, STATIC),
    "no wait for the K of the next tile": (only(NEXT_K), CAUSAL, STATIC),
    "no wait for the second K of the next tile": (only(UNLESS_SKIPPED), CAUSAL, STATIC),
    "no wait for the second K of the next tile of three": (only(ONE_MORE_K + ELSE, ELSE), CAUSAL, THREE),
    "no wait for the K behind a skip": (only(BEHIND_SKIP, "place of this one\n                    pass\n"), DIAGONAL, SKIPS),
    "the K behind a skip awaited before V is released": (only("(left > 0) & (done == 0)", "left > 0"), DIAGONAL, SKIPS),
    "K of no turn awaited": (only(LOOP_K, LOOP_K.replace("j + 1 < turns", "True")), CAUSAL, STATIC),
    "K of no tile awaited": (only(NEXT_K, NEXT_K.replace("turns > 0", "True")), CAUSAL, STATIC),
    "the first K released early": (only(FIRST_S + FREE_FIRST_K, FREE_FIRST_K + FIRST_S), CAUSAL, STATIC),
    "the first K never released": (only(FIRST_S + FREE_FIRST_K, FIRST_S), CAUSAL, STATIC),
    "K never released": (only(LOOP + WAIT_S + FREE_K, LOOP + WAIT_S), CAUSAL, STATIC),
    "K of the next tile never released": (only(ELSE + WAIT_S + FREE_K, ELSE + WAIT_S), CAUSAL, STATIC),
    "K of the next tile of three never released": (only(BOTH + FREE_K, BOTH), CAUSAL, THREE),
    "K released twice": (only(LOOP + WAIT_S + FREE_K, LOOP + WAIT_S + FREE_K * 2), CAUSAL, STATIC),
    # V
    "no wait for V": (only("    wait_full(v_ring, v_turn, BUILD.STAGES)\n"), CAUSAL, STATIC),
    "wait for the V of this turn": (only("    wait_full(v_ring, v_turn,", "    wait_full(v_ring, turn,"), CAUSAL, STATIC),
    "V released early": (only(ACC + FREE_V, FREE_V + ACC), CAUSAL, STATIC),
    "V never released": (only(ACC + FREE_V, ACC), CAUSAL, STATIC),
    "V released twice": (only(ACC + FREE_V, ACC + FREE_V * 2), CAUSAL, STATIC),
    "the last V released early": (only(ACC + FREE_LAST_V, FREE_LAST_V + ACC), CAUSAL, DYNAMIC),
    "the last V never released": (only(ACC + FREE_LAST_V, ACC), CAUSAL, DYNAMIC),
    "the last V of three released early": (only(BOTH + FREE_K + FREE_LAST_V, FREE_LAST_V + BOTH + FREE_K), CAUSAL, THREE),
    "the last V of three never released": (only(BOTH + FREE_K + FREE_LAST_V, BOTH + FREE_K), CAUSAL, THREE),
    "V of the turn before, behind skipped tiles": (
        only(LAST_PRODUCTS, LAST_PRODUCTS.replace("v_turn", "turn - 1")),
        DIAGONAL,
        SKIPS,
    ),
    "V of the turn before released": (only(ACC + FREE_LAST_V, ACC + FREE_V), DIAGONAL, SKIPS),
    "V of the turn before released of three": (
        only(BOTH + FREE_K + FREE_LAST_V, BOTH + FREE_K + FREE_V),
        DIAGONAL,
        SKIPS_THREE,
    ),
    "v_turn behind the skip": (
        only("            v_turn = turn - 1\n", "", NEXT_K, "            v_turn = turn - 1\n" + NEXT_K),
        DIAGONAL,
        SKIPS,
    ),
    # products
    "S awaited too late": (only(LOOP + WAIT_S, LOOP + WAIT_S.replace("1", "2")), CAUSAL, STATIC),
    "S of the next tile awaited too late": (only(ELSE + WAIT_S, ELSE + WAIT_S.replace("1", "2")), CAUSAL, STATIC),
    "acc awaited too late": (only(ACC + FREE_V, ACC.replace("0", "1") + FREE_V), CAUSAL, STATIC),
    "the last acc awaited too late": (only(ACC + FREE_LAST_V, ACC.replace("0", "1") + FREE_LAST_V), CAUSAL, STATIC),
    "nobody has the first turn": (only("    if CONSUMER == CONSUMERS - 1:", "    if CONSUMER == CONSUMERS:"), CAUSAL, STATIC),
    "a turn given to oneself": (only("FIRST_NAME + (CONSUMER + 1) % CONSUMERS", "FIRST_NAME + CONSUMER"), CAUSAL, STATIC),
    "a turn not taken": (
        only("    if BUILD.PINGPONG:\n        take_turn(CONSUMER)\n    s = _scores", "    s = _scores"),
        CAUSAL,
        STATIC,
    ),
    "Q of this tile for the next": (
        only("(slots, round, 0), round + 1, turn", "(slots, round, 0), round, turn"),
        CAUSAL,
        DYNAMIC,
    ),
    "Q of the other consumer": (
        only(
            "buffer_of(round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS), buffers, turn, BUILD)\n    if not",
            "buffer_of(round, BUILD.Q_STAGES, 0, BUILD.CONSUMERS), buffers, turn, BUILD)\n    if not",
        ),
        CAUSAL,
        STATIC,
    ),
    "acc not zeroed": (only("acc = gl.zeros([ROWS", "acc = acc if round > 0 else gl.zeros([ROWS"), CAUSAL, STATIC),
    "the second part of S instead of both": (
        only("q2, k2.permute((1, 0)), s, is_async", "q2, k2.permute((1, 0)), zero, is_async"),
        SPLIT,
        STATIC,
    ),
    # what consumers are told
    "no wait for the first slot": (only(FIRST_SLOT), CAUSAL, STATIC),
    "no wait for the next slot": (only(NEXT_SLOT), SHORT, "128x64 s2 q1 static"),
    "no empty slot awaited": (
        only("    mbarrier.wait(empty.index(i), " + TO_PUBLISH, "    zero"),
        SHORT,
        "128x64 s3 q2 static",
    ),
    "wrong phase of a slot": (only(TO_PUBLISH, TO_PUBLISH.replace(" ^ 1", "")), CAUSAL, STATIC),
    "a slot released early": (only(FREE_SLOT, "", NEXT_SLOT, FREE_SLOT + NEXT_SLOT), SHORT, "128x64 s3 q2 static"),
    "a slot never released": (only(FREE_SLOT), SHORT, STATIC),
    "a slot released twice": (only(FREE_SLOT, FREE_SLOT * 2), SHORT, STATIC),
    "two slots": (only("SLOTS = gl.constexpr(3)", "SLOTS = gl.constexpr(2)"), "b1 h4 q200 k60 d64 bf16", STATIC),
    "one slot": (only("SLOTS = gl.constexpr(3)", "SLOTS = gl.constexpr(1)"), CAUSAL, STATIC),
    "the end not announced": (
        only("    else:\n        publish", "    elif turns > 0:\n        publish"),
        CAUSAL,
        STATIC,
    ),
    "numbers of the next tile for the store": (
        only(
            "row = told(slots, round, SLOTS, ROW) + CONSUMER * ROWS\n    head",
            "row = told(slots, round + 1, SLOTS, ROW) + CONSUMER * ROWS\n    head",
        ),
        CAUSAL,
        STATIC,
    ),
    "numbers of this tile for the next": (only(AT_NEXT, AT_NEXT.replace("round + 1", "round")), CAUSAL, DYNAMIC),
    "edges of this tile for the next": (
        only("            full = (told(slots, round + 1, SLOTS, FULL), told(slots, round + 1, SLOTS, FULL_END))\n"),
        DIAGONAL,
        DYNAMIC,
    ),
    "head and batch exchanged": (only(NUMBERS, NUMBERS.replace("head, b", "b, head")), BATCHES, STATIC),
    "edges from 0 on": (only("early + (full_end - start) //", "early + full_end //"), WIDE, STATIC),
    "start not told": (only(NUMBERS, NUMBERS.replace("start, full,", "start * 0, full,")), WIDE, STATIC),
    "queries and keys exchanged": (
        only(NUMBERS, NUMBERS.replace("begin_q, len_q, begin_k, len_k", "begin_k, len_k, begin_q, len_q")),
        UNEVEN,
        QUEUE,
    ),
    "lengths exchanged": (
        only(NUMBERS, NUMBERS.replace("begin_q, len_q, begin_k, len_k", "begin_q, len_k, begin_k, len_q")),
        UNEVEN,
        QUEUE,
    ),
    "K of another sequence": (only("col = begin + key_tile_start", "col = key_tile_start"), PACKED, QUEUE),
    "Q of another sequence": (only("told(slots, round, SLOTS, BEGIN_Q) + "), PACKED, QUEUE),
    "K from the first key on": (only("turns - 1 - j, start, band", "turns - 1 - j, 0 * start, band"), WIDE, STATIC),
    "columns from 0 on": (
        only("return row, key_tile_start(key_tile, ", "return row, key_tile_start(key_tile, 0 * "),
        WIDE,
        STATIC,
    ),
    "rows of the first consumer": (only("row = CONSUMER * ROWS + told(", "row = told("), CAUSAL, STATIC),
    "stores of the first consumer": (only("SLOTS, ROW) + CONSUMER * ROWS\n    head", "SLOTS, ROW)\n    head"), CAUSAL, STATIC),
    "lengths of the whole tensor": (
        only("        len_k = told(slots, round, SLOTS, LEN_K)\n    row = CONSUMER", "    row = CONSUMER"),
        UNEVEN,
        QUEUE,
    ),
    # skipped key tiles
    "skipped K not given back": (only(SKIP_K[1]), DIAGONAL, SKIPS),
    "skipped V not given back": (only(SKIP_V[1]), DIAGONAL, SKIPS),
    "skipped K not awaited": (only(SKIP_K[0]), DIAGONAL, "192x128 s2 q2 static"),
    "skipped V not awaited": (only(SKIP_V[0]), DIAGONAL, "192x128 s2 q2 static"),
    "no turn for skipped tiles": (only(SKIP_TURN), DIAGONAL, SKIPS),
    "a tile too many skipped": (
        only("gl.maximum(turns - 1 - gl.maximum(", "gl.maximum(turns - gl.maximum("),
        DIAGONAL,
        SKIPS_THREE,
    ),
    "a tile too few skipped": (
        only("gl.maximum(turns - 1 - gl.maximum(", "gl.maximum(turns - 2 - gl.maximum("),
        DIAGONAL,
        SKIPS_THREE,
    ),
    "skipped as for the consumer before": (only("(CONSUMER + 1) * ROWS - 1", "CONSUMER * ROWS - 1"), DIAGONAL, SKIPS_THREE),
    "rows that see nothing skip all": (
        only("gl.maximum(last, 0) //", "last //"),
        FEW_KEYS,
        SKIPS_THREE,
    ),
    "skipped tiles computed in the loop": (only("range(1 + done, turns)", "range(1, turns)"), DIAGONAL, SKIPS),
    "skipped tiles not counted": (only("            turn += done\n"), DIAGONAL, SKIPS),
    "skipped tiles of the first tile not counted": (only("BUILD)\n        turn += done\n", "BUILD)\n"), DIAGONAL, SKIPS),
    "skipped tiles left at the begin": (
        only("        left = turns - 1 - done\n        p", "        left = turns - 1\n        p"),
        DIAGONAL,
        SKIPS,
    ),
    "skipped tiles left": (only("            left = turns - 1 - done\n", "            left = turns - 1\n"), DIAGONAL, SKIPS),
    # the schedule
    "a tile skipped": (only('sem="relaxed") + gl.num', 'sem="relaxed") + 1 + gl.num'), CAUSAL, DYNAMIC),
    "every second tile": (only("return tile + gl.num_programs(0)", "return tile + 2 * gl.num_programs(0)"), CAUSAL, STATIC),
    "counter not reset": (only("        gl.store(counter, 0, mask", "        (dict)(counter=counter, mask"), CAUSAL, DYNAMIC),
    "counter reset by one tile too early": (only("mask=tile == total - 1 +", "mask=tile == total - 2 +"), CAUSAL, DYNAMIC),
    "counter reset by one tile too late": (only("mask=tile == total - 1 +", "mask=tile == total +"), CAUSAL, DYNAMIC),
    "heads not grouped": (only("group = head // BUILD.GROUP", "group = head * 0"), GROUPED, STATIC),
    "heads taken in turn": (only("group = head // BUILD.GROUP", "group = head % BUILD.GROUP"), GROUPED, STATIC),
    "heads of a small last group": (only("tl.minimum(members, every", "tl.maximum(members, 0 * every"), MANY_KEYS, DYNAMIC),
    "a sequence too late in the order": (only("end <= place", "end < place"), PACKED, STATIC),
    "a row tile too many in the order": (only("+ 1) - 1 - place", "+ 1) - place"), PACKED, STATIC),
    "the last row tile of the order left out": (only("len_k), tiles * heads", "len_k), tiles * heads - 1"), PACKED, STATIC),
    "heads of packed sequences by the number at most": (
        only("heads, tiles, members, len_q, len_k), t", "heads, _tiles, members, len_q, len_k), t"),
        PACKED,
        STATIC,
    ),
    # masks
    "one key too many": (
        only(VISIBLE, VISIBLE.replace("end_key(rows, shift, len_k, band)", "1 + end_key(rows, shift, len_k, band)")),
        CAUSAL,
        STATIC,
        "probe",
    ),
    "one key too few": (only(VISIBLE, VISIBLE.replace("eights <", "eights + 1 <")), CAUSAL, STATIC, "probe"),
    "no end of K": (only(VISIBLE, VISIBLE.replace("gl.minimum(", "gl.maximum(9 + ")), RAGGED, STATIC),
    "window starts one late": (
        only("seen & (eights >= first_key", "seen & (eights > first_key"),
        NARROW,
        STATIC,
    ),
    "window starts one early": (
        only("seen & (eights >= first_key", "seen & (eights + 1 >= first_key"),
        NARROW,
        STATIC,
    ),
    "columns of a thread mixed up": (
        only(
            "own = col + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)",
            "own = col + along(4, LAYOUT, 2) + 4 * along(2, LAYOUT, 3)",
        ),
        CAUSAL,
        STATIC,
        "probe",
    ),
    "aligned to the top left": (only("own_k - own_q, band, float", "0, band, float"), CAUSAL, STATIC),
    "no mask at the left edge": (only(EDGES, "key_tile >= end"), WIDE, STATIC),
    "no mask at the right edge": (only(EDGES, "key_tile < first"), CAUSAL, STATIC),
    "masks of the first key tile alone": (only("if FIRST or BUILD.BANDED:", "if FIRST:"), CAUSAL, STATIC),
    # softmax
    "accumulator not scaled": (only("_scale_rows(acc, opaque(alpha))", "acc + 0"), CAUSAL, STATIC, "spiky"),
    "accumulator not scaled, lazy": (
        only("scale_unless_one(acc, factor, BUILD.BLOCK_DV // 2)", "acc + 0"),
        CAUSAL,
        LAZY,
        "spiky",
    ),
    "a lazy maximum scales all the same": (only("gl.where(m_new == m, 1.0, alpha)", "alpha * 0.5"), CAUSAL, LAZY),
    "a lazier maximum": (only("* scale_log2 <= 8.0", "* scale_log2 <= 80.0"), "b1 h1 q100 k300 d64 fp16", LAZY, "spiky"),
    "a maximum that stays": (only("* scale_log2 <= 8.0, m, m_new)", "* scale_log2 <= 8.0, m_new, m)"), CAUSAL, LAZY, "spiky"),
    "row sum not scaled": (only("l * gl.expand_dims(own, 1) + thread", "l + thread"), CAUSAL, STATIC),
    "row sum of one thread": (only("l = gl.convert_layout(gl.sum(l, 1)", "l = gl.convert_layout(gl.max(l, 1)"), CAUSAL, STATIC),
    "maximum of the tile alone": (only("m_new = gl.maximum(m, m_new)", "m_new = m_new + 0"), STEEP, STATIC),
    "no finite pivot": (
        only('pivot = gl.where(m_new == float("-inf"), 0.0, pivot)\n    p = gl.exp2(s *', "pass\n    p = gl.exp2(s *"),
        FEW_KEYS,
        STATIC,
    ),
    "a negative scale applied late": (only("        s = s * scale_log2\n", "        pass\n"), NEGATIVE, STATIC),
    "a negative scale applied twice": (
        only("unit = 1.0 if BUILD.PRESCALE or BUILD.CAP else scale_log2\n    if", "unit = scale_log2\n    if"),
        NEGATIVE,
        STATIC,
    ),
    "a negative scale in the LSE": (
        only("finish(m, l, 1.0 if BUILD.PRESCALE or BUILD.CAP or BUILD.STEADY else scale_log2)", "finish(m, l, scale_log2)"),
        NEGATIVE,
        STATIC,
    ),
    # the store
    "maxima of the next tile": (only("_close(old_m,", "_close(m,"), CAUSAL, STATIC),
    "sums of the next tile": (only("_close(old_m, old_l,", "_close(old_m, l,"), CAUSAL, STATIC),
    "maxima of this tile go on": (only(CLOSE, "                m = old_m\n" + CLOSE), CAUSAL, STATIC),
    "sums of this tile go on": (only(CLOSE, "                l = old_l\n" + CLOSE), CAUSAL, STATIC),
    "three close the next tile": (
        only("far = _close(m, l, drop, slots, round,", "far = _close(m, l, drop, slots, round + 1,"),
        CAUSAL,
        THREE,
    ),
    "no fence": (only("    fence_async_shared()\n    tma_store", "    tma_store"), CAUSAL, STATIC),
    "O overwritten before it was stored": (only("    store_wait(0)  # the one before has read the buffer\n"), SHORT, STATIC),
    "the left half of O overwritten": (only("    store_wait(0)  # the one before has read the buffer\n"), HALVES, WIDE_O),
    "the last store not awaited": (
        only("            turn += 1\n        store_wait(0)\n", "            turn += 1\n"),
        CAUSAL,
        STATIC,
    ),
    "one buffer of O for all": (only("o_buffers.index(CONSUMER)", "o_buffers.index(0)"), CAUSAL, STATIC),
    "the right half of O on the left": (
        only(
            "_store_by_tma(right, inverse, o_buffer, b, begin_q + row, head, BUILD.BLOCK_O,",
            "_store_by_tma(right, inverse, o_buffer, b, begin_q + row, head, 0,",
        ),
        HALVES,
        WIDE_O,
    ),
    "even columns of O are the left half": (
        only("[ROWS, 2, BUILD.BLOCK_O]).permute(0, 2, 1)", "[ROWS, BUILD.BLOCK_O, 2])"),
        HALVES,
        WIDE_O,
    ),
    "O not divided": (
        only("(acc, inverse).to(o_source.dtype)\n    store_wait", "(acc, inverse * 0 + 1).to(o_source.dtype)\n    store_wait"),
        CAUSAL,
        STATIC,
    ),
    "a store into the next sequence": (
        only("if BUILD.PACKED and row + ROWS > len_q:", "if BUILD.PACKED and row >= len_q:"),
        PACKED,
        QUEUE,
    ),
    "a sequence's last rows a row too far": (
        only("expand_dims(rows < len_q, 1)", "expand_dims(rows < len_q + 1, 1)"),
        PACKED,
        QUEUE,
    ),
    "padded columns stored": (
        only(" & (gl.expand_dims(dims, 0) < BUILD.DIM_V)"),
        "b2 h2 q100 k100 d160/24 fp16 packed causal",
        QUEUE,
    ),
    "O of the sequence before": (
        only("_store_by_tma(acc, inverse, o_buffer, b, begin_q + row", "_store_by_tma(acc, inverse, o_buffer, b, row"),
        PACKED,
        QUEUE,
    ),
    "ragged O of the sequence before": (only("((begin_q + rows).to", "(rows.to"), PACKED, QUEUE),
    "LSE of the sequence before": (
        only("            line += told(slots, round, SLOTS, BEGIN_Q)\n", "            pass\n"),
        PACKED,
        QUEUE,
    ),
    "LSE of another batch": (only("BATCH).to(gl.int64) * heads +", "BATCH).to(gl.int64) +"), BATCHES, STATIC),
    "LSE a row too far": (only("lse, mask=rows < len_q)", "lse, mask=rows < len_q + 1)"), PACKED, QUEUE),
    "LSE in base 2": (
        only("(m * scale_log2 + gl.log2(l_safe)) * 0.6931471805599453", "(m * scale_log2 + gl.log2(l_safe))"),
        CAUSAL,
        STATIC,
    ),
    # suspect rows
    "flag of another head": (only(FLAG, FLAG.replace("+ head)", "+ head * 0)")), NAN_HEADS, STATIC, "nan(v)"),
    "flag of another batch": (only(FLAG, FLAG.replace("(b *", "((b + 1) *")), NAN_HEADS, STATIC, "nan(v)"),
    "flag of another tile": (only(FLAG, FLAG.replace("+ row // ROWS", "+ (row // ROWS ^ 1)")), NAN_TILES, ONE, "nan(v)"),
    "flags of 128 rows": (only(FLAG_PACKED, FLAG_PACKED.replace("row // ROWS", "row // 128")), NAN_PACKED, STATIC, "nan(v)"),
    "flag of another sequence": (only(FLAG_PACKED, FLAG_PACKED.replace(" + sequence", "")), NAN_PACKED, STATIC, "nan(v)"),
    "flag of the first consumer": (
        only("flag = told(slots, round, SLOTS, FLAG) + CONSUMER", "flag = told(slots, round, SLOTS, FLAG)"),
        NAN_TILES,
        STATIC,
        "nan(v)",
    ),
    "flag not told": (only(NUMBERS, NUMBERS.replace("flag", "row")), NAN_HEADS, STATIC, "nan(v)"),
    "a mark at every row": (only("1, mask=bad & gl", "1, mask=gl"), CAUSAL, STATIC),
    "NaN not noticed": (only("bad = total != total", "bad = total > total"), NAN, QUEUE, "nan(v)"),
    "far rows not noticed": (
        only("(gl.abs(top * scale_log2) > 16777216.0)", "(gl.abs(top * scale_log2) > 1e30)"),
        RAGGED,
        STATIC,
        "constant(133120)",
    ),
}
