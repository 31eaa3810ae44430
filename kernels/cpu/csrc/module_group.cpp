// The Group and its collectives for Python.
#include <optional>
#include <stdexcept>
#include <vector>

#include "positions.h"
#include "python_engine.h"

using namespace nanobind::literals;

namespace voltapile {
namespace {

// Python's handlers of signals run between two looks, so that whoever waits can be told to end.
// True if one has raised; the exception stays set.
bool handle_signals() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

GroupArgs group_args(const BytesOut& memory, int rank, int ranks, std::int64_t room, double seconds,
                     std::uintptr_t abort, std::uintptr_t waits_for, std::uintptr_t heartbeat,
                     bool crowded) {
  if (static_cast<std::int64_t>(memory.size()) < Group::bytes(ranks, room)) {
    throw std::invalid_argument("group: the memory is too small");
  }
  return {memory.data(), rank, ranks, room, seconds,
          reinterpret_cast<const std::atomic<std::uint32_t>*>(abort),
          reinterpret_cast<std::atomic<std::int32_t>*>(waits_for),
          reinterpret_cast<std::atomic<std::int64_t>*>(heartbeat), crowded, handle_signals};
}

const float* data_or_null(const std::optional<Floats>& x) { return x ? x->data() : nullptr; }

// The group that messages need.
Group* group_of(Engine& engine) {
  if (!engine.group()) throw std::invalid_argument("this engine has not joined a group");
  return engine.group();
}

void all_reduce(Engine& engine, std::optional<Floats> part, FloatsOut out, bool accumulate) {
  engine.submit(make_all_reduce(engine.group(), data_or_null(part), out.data(),
                                static_cast<std::int64_t>(out.size()), accumulate),
                part, out);
}

void all_gather(Engine& engine, std::optional<Floats> part, FloatsOut out,
                std::vector<std::int64_t> widths) {
  engine.submit(make_all_gather(engine.group(), data_or_null(part), out.data(),
                                static_cast<std::int64_t>(out.shape(0)), std::move(widths)),
                part, out);
}

void broadcast(Engine& engine, BytesOut data, int source) {
  engine.submit(make_broadcast(engine.group(), data.data(),
                               static_cast<std::int64_t>(data.size()), source),
                data);
}

void send(Engine& engine, Floats x, int target) {
  engine.submit(make_send(group_of(engine), x.data(), static_cast<std::int64_t>(x.size()), target),
                x);
}

void receive(Engine& engine, FloatsOut x, int source) {
  engine.submit(
      make_receive(group_of(engine), x.data(), static_cast<std::int64_t>(x.size()), source), x);
}

void place(Engine& engine, Floats x, FloatsOut out, std::int64_t offset) {
  engine.submit(make_place(x.data(), out.data(), static_cast<std::int64_t>(x.shape(0)),
                           static_cast<std::int64_t>(x.shape(1)),
                           static_cast<std::int64_t>(out.shape(1)), offset),
                x, out);
}

void take(Engine& engine, Floats x, FloatsOut out, std::int64_t offset) {
  const auto size = [](const auto& array, int axis) {
    return static_cast<std::int64_t>(array.shape(axis));
  };
  engine.submit(
      make_take({x.data(), out.data(), size(x, 0), size(x, 1), size(out, 1), offset}), x, out);
}

void keep(Engine& engine, Ints positions, Ints slots, IntsOut seen, IntsOut stored,
          IntsOut stored_slots, std::int64_t part, std::int64_t parts, std::int64_t run,
          std::int32_t padding) {
  engine.submit(make_keep({positions.data(), slots.data(), seen.data(), stored.data(),
                           stored_slots.data(), static_cast<std::int64_t>(positions.size()), part,
                           parts, run, padding}),
                positions, slots, seen, stored, stored_slots);
}

void weigh(Engine& engine, FloatsOut o, Floats weights, Floats all_weights) {
  const std::int64_t tokens = static_cast<std::int64_t>(weights.shape(0));
  const std::int64_t heads = static_cast<std::int64_t>(weights.shape(1));
  const std::int64_t dim = static_cast<std::int64_t>(o.shape(1)) / heads;
  const std::int64_t parts = static_cast<std::int64_t>(all_weights.shape(1)) / heads;
  const WeighArgs task{o.data(), weights.data(), all_weights.data(), tokens, heads, dim, parts};
  engine.submit(make_weigh(task), o, weights, all_weights);
}

}  // namespace

GroupObject::GroupObject(BytesOut memory, int rank, int ranks, std::int64_t room, double seconds,
                         std::uintptr_t abort, std::uintptr_t waits_for, std::uintptr_t heartbeat,
                         bool crowded)
    : memory(memory),
      group(group_args(memory, rank, ranks, room, seconds, abort, waits_for, heartbeat, crowded)) {}

void bind_group(nb::module_& m, nb::class_<Engine>& engine) {
  const auto same = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto maybe = [](const char* name) { return nb::arg(name).noconvert().none(); };

  nb::class_<GroupObject>(m, "Group")
      .def(nb::init<BytesOut, int, int, std::int64_t, double, std::uintptr_t, std::uintptr_t,
                    std::uintptr_t, bool>(),
           same("memory"), "rank"_a, "ranks"_a, "room"_a, "seconds"_a, "abort"_a, "waits_for"_a,
           "heartbeat"_a, "crowded"_a)
      .def_static("bytes", &Group::bytes, "ranks"_a, "room"_a);
  engine.def("join", &Engine::join, "group"_a)
      .def("all_reduce", all_reduce, maybe("part"), same("out"), "accumulate"_a)
      .def("all_gather", all_gather, maybe("part"), same("out"), "widths"_a)
      .def("broadcast", broadcast, same("data"), "source"_a)
      .def("send", send, same("x"), "target"_a)
      .def("receive", receive, same("x"), "source"_a)
      .def("place", place, same("x"), same("out"), "offset"_a)
      .def("take", take, same("x"), same("out"), "offset"_a)
      .def("keep", keep, same("positions"), same("slots"), same("seen"), same("stored"),
           same("stored_slots"), "part"_a, "parts"_a, "run"_a, "padding"_a)
      .def("weigh", weigh, same("o"), same("weights"), same("all_weights"));
}

}  // namespace voltapile
