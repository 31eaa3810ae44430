// The ops of kernels/families.py for Python. Shapes are checked in kernels/cpu/{experts,...}.py.
#include <optional>
#include <stdexcept>
#include <vector>

#include "experts.h"
#include "families.h"
#include "python_objects.h"

using namespace nanobind::literals;

namespace voltapile {
namespace {

using Longs = Array<std::int64_t>;

template <class A>
std::int64_t size(const A& x) {
  return static_cast<std::int64_t>(x.size());
}
template <class A>
std::int64_t dim(const A& x, std::size_t axis) {
  return static_cast<std::int64_t>(x.shape(axis));
}

// --- experts and gates ---------------------------------------------------------------------------

void round_bf16(Engine& engine, Floats x, FloatsOut out) {
  engine.submit(make_round_bf16(x.data(), out.data(), size(x)), x, out);
}

void route(Engine& engine, Floats logits, std::int64_t generated, IntsOut chosen,
           FloatsOut weights, Longs counts) {
  engine.submit(make_route({logits.data(), dim(logits, 0), dim(logits, 1), dim(chosen, 1),
                            generated, chosen.data(), weights.data(), counts.data()}),
                logits, chosen, weights, counts);
}

void experts(Engine& engine, Floats x, Ints chosen, Floats weights,
             const std::vector<nb::object>& matrices, std::int64_t count, std::int64_t first,
             FloatsOut out, bool accumulate, BytesOut quantised, FloatsOut inner,
             BytesOut inner_quantised, FloatsOut outputs, IntsOut lists) {
  const ExpertScratch scratch{quantised.data(), inner.data(), inner_quantised.data(),
                              outputs.data(), lists.data()};
  engine.submit(
      make_experts({x.data(), dim(x, 0), chosen.data(), weights.data(), dim(chosen, 1),
                    matrix_of(matrices.at(0)), matrix_of(matrices.at(1)),
                    matrix_of(matrices.at(2)), count, first, out.data(), accumulate, scratch}),
      x, chosen, weights, matrices, out, quantised, inner, inner_quantised, outputs, lists);
}

void silu(Engine& engine, FloatsOut x, float scale) {
  engine.submit(make_call(family_kernels().silu, SiluArgs{x.data(), size(x), scale}), x);
}

void gate(Engine& engine, FloatsOut y, Floats gates) {
  engine.submit(make_call(family_kernels().gate, GateArgs{y.data(), gates.data(), size(y)}), y,
                gates);
}

void gate_rows(Engine& engine, FloatsOut y, Floats x, Floats weight) {
  const GateRowsArgs args{y.data(), x.data(), weight.data(), dim(y, 0), dim(y, 1), dim(x, 1)};
  engine.submit(make_call(family_kernels().gate_rows, args), y, x, weight);
}

void split_heads(Engine& engine, Floats x, std::int64_t width, FloatsOut first, FloatsOut second) {
  engine.submit(make_split_heads(x.data(), size(first) / width, width, first.data(),
                                 second.data()),
                x, first, second);
}

// --- states --------------------------------------------------------------------------------------

// The arrays of a Batch that tell how a state goes on.
struct StepArrays {
  Ints slots, positions;
  std::optional<Ints> kept;
  bool is_provisional;
  StepView view() const {
    return {slots.data(), positions.data(), kept ? kept->data() : nullptr, size(slots),
            is_provisional};
  }
};

StepArrays step_of(nb::handle batch) {
  const nb::object kept = batch.attr("kept");
  return {nb::cast<Ints>(batch.attr("slots"), false),
          nb::cast<Ints>(batch.attr("positions"), false),
          kept.is_none() ? std::optional<Ints>() : nb::cast<Ints>(kept, false),
          nb::cast<bool>(batch.attr("is_provisional"))};
}

// rows [slots, depth, width], log [slots, kMaxProvisional, width], logged [slots].
struct HistoryArrays {
  FloatsOut rows, log;
  IntsOut logged;
  History view() const {
    return {rows.data(), log.data(), logged.data(), dim(rows, 1), dim(rows, 2)};
  }
};

HistoryArrays history_of(const std::tuple<FloatsOut, FloatsOut, IntsOut>& arrays) {
  return {std::get<0>(arrays), std::get<1>(arrays), std::get<2>(arrays)};
}

void delta_net(Engine& engine, const std::vector<Floats>& inputs,
               const std::vector<Floats>& weights, std::vector<std::int32_t> key_head_of,
               std::int64_t key_heads, float eps, bool gates_by_sigmoid,
               const std::tuple<FloatsOut, FloatsOut, IntsOut>& history,
               const std::vector<FloatsOut>& state, nb::handle batch, FloatsOut out) {
  const StepArrays step = step_of(batch);
  const HistoryArrays before = history_of(history);
  DeltaArgs args{};
  args.m = inputs.at(0).data();
  args.z = inputs.at(1).data();
  args.b = inputs.at(2).data();
  args.a = inputs.at(3).data();
  args.taps = weights.at(0).data();
  args.rate = weights.at(1).data();
  args.dt = weights.at(2).data();
  args.norm = weights.at(3).data();
  args.out = out.data();
  args.matrices = state.at(0).data();
  args.log_b = state.at(1).data();
  args.log_a = state.at(2).data();
  args.history = before.view();
  args.step = step.view();
  args.key_heads = key_heads;
  args.value_heads = static_cast<std::int64_t>(key_head_of.size());
  args.dim = size(weights[3]);
  args.kernel = dim(weights[0], 0);
  args.eps = eps;
  args.gates_by_sigmoid = gates_by_sigmoid;
  engine.submit(make_delta_net(args, std::move(key_head_of), Pool::kLocalBytes), inputs, weights,
                before, state, step, out);
}

// --- residual streams ----------------------------------------------------------------------------

void streams(Engine& engine, Floats x, FloatsOut out) {
  engine.submit(make_streams(x.data(), dim(x, 0), dim(x, 1), dim(out, 1) / dim(x, 1), out.data()),
                x, out);
}

void stream_norm(Engine& engine, Floats x, Floats weight, std::int64_t width, float eps,
                 FloatsOut out) {
  const StreamNormArgs args{x.data(), weight.data(), out.data(), dim(x, 0), dim(x, 1) / width,
                            width, eps};
  engine.submit(make_call(family_kernels().stream_norm, args), x, weight, out);
}

void stream_mix(Engine& engine, Floats x, Floats gates, FloatsOut out) {
  const std::int64_t width = dim(out, 1);
  const StreamMixArgs args{x.data(), gates.data(), out.data(), dim(x, 0), dim(x, 1) / width,
                           width};
  engine.submit(make_call(family_kernels().stream_mix, args), x, gates, out);
}

void stream_add(Engine& engine, FloatsOut x, Floats inject, Floats y) {
  const StreamAddArgs args{x.data(), inject.data(), y.data(), dim(y, 0), dim(inject, 1),
                           dim(y, 1)};
  engine.submit(make_call(family_kernels().stream_add, args), x, inject, y);
}

// --- n-grams -------------------------------------------------------------------------------------

void ngram_rows(Engine& engine, nb::handle batch, std::vector<std::uint64_t> multipliers,
                std::vector<std::uint64_t> moduli, std::vector<std::uint64_t> offsets,
                std::int32_t boundary, Longs rows) {
  const StepArrays step = step_of(batch);
  const Ints history = nb::cast<Ints>(batch.attr("history"), false);
  const HashArgs args{step.slots.data(), step.positions.data(), history.data(), size(step.slots),
                      dim(history, 1), rows.data()};
  Hashing hashing{std::move(multipliers), std::move(moduli), std::move(offsets), boundary};
  engine.submit(make_ngram_rows(args, std::move(hashing)), step, history, rows);
}

void embed_rows(Engine& engine, nb::object table, Array<const std::int64_t> rows, FloatsOut out) {
  engine.submit(make_embed_rows(matrix_of(table), rows.data(), size(rows), out.data()), table, rows,
                out);
}

void ngram_add(Engine& engine, FloatsOut x, Floats key, Floats value,
               const std::vector<Floats>& weights, std::int64_t dilation,
               const std::tuple<FloatsOut, FloatsOut, IntsOut>& history, nb::handle batch,
               float eps, FloatsOut added, FloatsOut normed) {
  const StepArrays step = step_of(batch);
  const HistoryArrays before = history_of(history);
  const std::int64_t width = dim(value, 1);
  const NGramArgs args{x.data(),
                       key.data(),
                       value.data(),
                       weights.at(0).data(),
                       weights.at(1).data(),
                       weights.at(2).data(),
                       weights.at(3).data(),
                       added.data(),
                       normed.data(),
                       before.view(),
                       step.view(),
                       dim(x, 1) / width,
                       width,
                       dim(weights.at(3), 0),
                       dilation,
                       eps};
  engine.submit(make_call(family_kernels().ngram_add, args), x, key, value, weights, before, step,
                added, normed);
}

// --- attention to chosen blocks ------------------------------------------------------------------

IndexLayout index_layout(const FloatsOut& ring, const FloatsOut& pooled, std::int64_t page_tokens,
                         std::int64_t block) {
  const IndexLayout layout{ring.data(), pooled.data(), dim(ring, 0), page_tokens, block,
                           dim(ring, 2)};
  if (size(pooled) < layout.pages * layout.dim * layout.pitch())
    throw std::invalid_argument("index cache: the arrays are too small");
  return layout;
}

void index_store(Engine& engine, FloatsOut ring, FloatsOut pooled, std::int64_t page_tokens,
                 std::int64_t block, Floats keys, Floats norm, Floats inv_freq, float scale,
                 float eps, Ints slots, Ints positions, Ints table) {
  std::vector<float> frequencies(inv_freq.data(), inv_freq.data() + inv_freq.size());
  const IndexStoreArgs args{keys.data(), norm.data(), scale, eps,
                            index_layout(ring, pooled, page_tokens, block),
                            places(slots, positions, table)};
  engine.submit(make_index_store(args, std::move(frequencies)), ring, pooled, keys, norm, slots,
                positions, table);
}

void choose_blocks(Engine& engine, FloatsOut ring, FloatsOut pooled, std::int64_t page_tokens,
                   std::int64_t block, Floats q, std::int64_t heads, Ints slots, Ints positions,
                   Ints table, FloatsOut scores, IntsOut chosen, IntsOut counts) {
  const ChooseArgs args{q.data(), heads, dim(chosen, 1),
                        index_layout(ring, pooled, page_tokens, block),
                        places(slots, positions, table), scores.data(), dim(scores, 0),
                        chosen.data(), counts.data()};
  engine.submit(make_choose_blocks(args), ring, pooled, q, slots, positions, table, scores, chosen,
                counts);
}

ChosenArgs chosen_args(nb::handle cache, const Ints& chosen, const Ints& counts,
                       std::int64_t block, const Ints& slots, const Ints& positions,
                       const Ints& table) {
  ChosenArgs args{};
  args.attention.cache = nb::cast<CacheObject&>(cache).layout;
  args.attention.at = places(slots, positions, table);
  args.chosen = chosen.data();
  args.counts = counts.data();
  args.most = dim(chosen, 1);
  args.block = block;
  return args;
}

std::int64_t node_floats(nb::handle cache, Ints chosen, Ints counts, std::int64_t block,
                         Ints slots, Ints positions, Ints table,
                         const std::vector<std::int32_t>& head_map) {
  return chosen_node_floats(chosen_args(cache, chosen, counts, block, slots, positions, table),
                            head_map);
}

void attention_to(Engine& engine, Floats q, FloatsOut out, nb::object cache, Ints chosen,
                  Ints counts, std::int64_t block, Ints slots, Ints positions, Ints table,
                  const std::vector<std::int32_t>& head_map, float scale, FloatsOut nodes) {
  ChosenArgs args = chosen_args(cache, chosen, counts, block, slots, positions, table);
  args.attention.q = q.data();
  args.attention.out = out.data();
  args.attention.scale = scale;
  args.nodes = nodes.data();
  engine.submit(make_attention_to(args, head_map), q, out, cache, chosen, counts, slots, positions,
                table, nodes);
}

}  // namespace

void bind_families(nb::module_& m, nb::class_<Engine>& engine) {
  const auto same = [](const char* name) { return nb::arg(name).noconvert(); };

  engine.def("round_bf16", round_bf16, same("x"), same("out"))
      .def("route", route, same("logits"), "generated"_a, same("chosen"), same("weights"),
           same("counts"))
      .def("experts", experts, same("x"), same("chosen"), same("weights"), "matrices"_a, "count"_a,
           "first"_a, same("out"), "accumulate"_a, same("quantised"), same("inner"),
           same("inner_quantised"), same("outputs"), same("lists"))
      .def("silu", silu, same("x"), "scale"_a)
      .def("gate", gate, same("y"), same("gates"))
      .def("gate_rows", gate_rows, same("y"), same("x"), same("weight"))
      .def("split_heads", split_heads, same("x"), "width"_a, same("first"), same("second"))
      .def("delta_net", delta_net, same("inputs"), same("weights"), "key_head_of"_a, "key_heads"_a,
           "eps"_a, "gates_by_sigmoid"_a, same("history"), same("state"), "batch"_a, same("out"))
      .def("streams", streams, same("x"), same("out"))
      .def("stream_norm", stream_norm, same("x"), same("weight"), "width"_a, "eps"_a, same("out"))
      .def("stream_mix", stream_mix, same("x"), same("gates"), same("out"))
      .def("stream_add", stream_add, same("x"), same("inject"), same("y"))
      .def("ngram_rows", ngram_rows, "batch"_a, "multipliers"_a, "moduli"_a, "offsets"_a,
           "boundary"_a, same("rows"))
      .def("embed_rows", embed_rows, "table"_a, same("rows"), same("out"))
      .def("ngram_add", ngram_add, same("x"), same("key"), same("value"), same("weights"),
           "dilation"_a, same("history"), "batch"_a, "eps"_a, same("added"), same("normed"))
      .def("index_store", index_store, same("ring"), same("pooled"), "page_tokens"_a, "block"_a,
           same("keys"), same("norm"), same("inv_freq"), "scale"_a, "eps"_a, same("slots"),
           same("positions"), same("table"))
      .def("choose_blocks", choose_blocks, same("ring"), same("pooled"), "page_tokens"_a,
           "block"_a, same("q"), "heads"_a, same("slots"), same("positions"), same("table"),
           same("scores"), same("chosen"), same("counts"))
      .def("attention_to", attention_to, same("q"), same("out"), "cache"_a, same("chosen"),
           same("counts"), "block"_a, same("slots"), same("positions"), same("table"),
           "head_map"_a, "scale"_a, same("nodes"));
  m.def("chosen_node_floats", node_floats, "cache"_a, same("chosen"), same("counts"), "block"_a,
        same("slots"), same("positions"), same("table"), "head_map"_a);
}

}  // namespace voltapile
