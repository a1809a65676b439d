// Tensors: how they are made and copied, and how every other op runs: by its CPU kernel, on the worker of the current stream.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "device.h"

namespace simdev {

// A tensor without its reference count: memory is freed when the host frees it, as on a real device.
struct Operand {
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  Range at;
  char* data = nullptr;  // where workers find it

  explicit Operand(const at::Tensor& t) : sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()) {
    if (!t.numel()) return;
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); i++) last += (sizes[i] - 1) * strides[i];
    at.lo = (const char*)t.const_data_ptr();
    at.hi = at.lo + (last + 1) * t.element_size();
    for (auto* a : {&arenas().dev, &arenas().pinned}) if (a->has(at.lo)) data = a->to_device(at.lo);
    if (!data) data = (char*)at.lo;
  }
  at::Tensor on_cpu() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    return data ? at::from_blob(data, sizes, strides, options) : at::empty_strided(sizes, strides, options);
  }
};

// ---- making tensors

using OptType = std::optional<c10::ScalarType>;
using OptLayout = std::optional<c10::Layout>;
using OptDevice = std::optional<c10::Device>;

inline c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Tensor empty(c10::IntArrayRef size, OptType dtype, OptLayout, OptDevice, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory(), keys(), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, OptType dtype, OptLayout, OptDevice, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory(), keys(), c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::IntArrayRef size) { return at::native::view(t, size); }
at::Tensor reshape_alias(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}
at::Tensor& set_storage_part(at::Tensor& t, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(t, s, offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage s) { return at::native::set_(t, s); }
at::Tensor view_as_complex(const at::Tensor& t) { return at::native::view_as_complex(t); }
at::Tensor view_as_real(const at::Tensor& t) { return at::native::view_as_real(t); }
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& s) { return at::native::set_tensor_(t, s); }

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  auto data = device_memory().allocate(size);
  size_t n = std::min(size, storage.nbytes());
  if (n) {
    auto from = (const char*)storage.data(), to = (const char*)data.get();
    issue(current(), {"resize", "d2d", n, [=] { memcpy(arenas().dev.to_device(to), arenas().dev.to_device(from), n); }},
          {{{from, from + n}, false}, {{to, to + n}, true}});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == c10::MemoryFormat::Contiguous, "simdev: resize_ knows contiguous tensors only");
  size_t need = (c10::multiply_integers(size) + t.storage_offset()) * t.element_size();
  if (t.storage().nbytes() < need) Hooks().resizePrivateUse1Bytes(t.storage(), need);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

void record_stream(at::Tensor& t, c10::Stream s) { device_memory().recordStream(t.storage().data_ptr(), s); }

// ---- copies

// The link to the host: one engine in each direction, which serves one copy after the other.
struct Link {
  std::mutex m;
  void move(double rate, size_t bytes, const std::function<void()>& copy) {
    std::lock_guard<std::mutex> l(m);
    auto end = Clock::now() + seconds(settings().get()->latency + (rate > 0 ? bytes / rate : 0));
    copy();
    std::this_thread::sleep_until(end);
  }
};
struct Links { Link h2d, d2h; };
SIMDEV_GLOBAL(Links, links)

void below_autograd(const std::function<void()>& f) {
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::InferenceMode no_grad(false);
  f();
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Operand a(from), b(to);
  counters().add("copies.d2d");
  counters().add("bytes.d2d", to.nbytes());
  issue(current(), {"copy d2d", "d2d", to.nbytes(), [a, b] { below_autograd([&] { b.on_cpu().copy_(a.on_cpu()); }); }},
        {{a.at, false}, {b.at, true}});
}

// Over the link, both sides contiguous and of one type. As in CUDA: asynchronous only if the host's side is pinned; otherwise the
// call returns when the copy is over. Without non_blocking the host waits, and knows that it is over.
void copy_over_link(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool up = to.is_privateuseone();  // host to device
  const char* way = up ? "h2d" : "d2h";
  const at::Tensor& host_side = up ? from : to;
  bool pinned = pinned_memory().has(host_side.const_data_ptr());
  const char* kind = pinned ? ".pinned" : ".pageable";
  size_t n = to.nbytes();
  counters().add(c10::str("copies.", way, kind));
  counters().add(c10::str("bytes.", way, kind), n);

  Operand a(from), b(to);
  std::vector<Use> uses{{(up ? b : a).at, up}};
  if (pinned) {
    Use host{(up ? a : b).at, !up};
    if (non_blocking && up) host.hashed = true;
    if (non_blocking && !up) { std::lock_guard<std::mutex> l(world()); host.guarded = pinned_memory().guardable(host.at); }
    uses.push_back(host);
  }
  auto copy = [from = a.data, to = b.data, n, up] {
    auto cfg = settings().get();
    (up ? links().h2d : links().d2h).move(up ? cfg->h2d : cfg->d2h, n, [&] { memcpy(to, from, n); });
  };
  int s = current();
  uint64_t task = issue(s, {c10::str("copy ", way), way, n, copy}, uses);
  if (pinned) pinned_memory().used(host_side.const_data_ptr(), s, task);
  if (!non_blocking || (!pinned && !up)) synchronize(s, "copy");
  else if (!pinned) {  // the source may be used again, but nothing is known about the device
    count_sync("copy");
    WithoutGil g;
    streams().get(s).wait(task);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  auto source = from.expand_as(to);
  if (source.is_privateuseone() && to.is_privateuseone()) { copy_on_device(source, to); return to; }
  auto to2 = to.is_contiguous() ? to : at::empty_like(to, to.options(), c10::MemoryFormat::Contiguous);
  copy_over_link(source.to(to.scalar_type()).contiguous(), to2, non_blocking);  // what must be converted, is where it is
  if (!to2.is_same(to)) to.copy_(to2, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& t) {
  Operand a(t);
  issue(current(), {"item", "d2h", t.nbytes(), [] {}}, {{a.at, false}});
  synchronize(current(), "item");
  return a.on_cpu().item();
}

// ---- every other op

using IValue = c10::IValue;
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

IValue map_tensors(const IValue& v, const TensorMap& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> out;
    for (at::Tensor t : v.toTensorList()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return v;
}

// Ops whose results have a size that depends on data: the host has to wait for them, on every device.
bool waits(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::equal"};
  return names.count(name);
}

struct Call {
  c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> args;
  std::vector<int> same_as;       // result -> the argument that it is, or -1
  bool wait, is_view = false;
  torch::jit::Stack shapes;       // results on the device "meta"

  Call(const c10::OperatorHandle& o, torch::jit::Stack* stack) : op(o), schema(o.schema()), name(schema.name()) {
    size_t n = schema.arguments().size();
    args.assign(stack->end() - n, stack->end());
    stack->resize(stack->size() - n);
    wait = waits(name);
    for (auto& r : schema.returns()) {
      auto* alias = r.alias_info();
      same_as.push_back(-1);
      for (size_t i = 0; alias && i < n; i++) {
        auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) same_as.back() = i;
      }
      if (alias && !alias->isWrite()) is_view = true;
      auto kind = r.type()->kind();
      bool tensors = kind == c10::TypeKind::TensorType || (kind == c10::TypeKind::ListType && r.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
      if (!tensors) wait = true;  // a number, a bool
    }
  }

  bool writes(size_t i) const { auto* a = schema.arguments()[i].alias_info(); return a && a->isWrite(); }

  // Kernels cannot read the host's memory: only numbers (0-d) may come from there. Indices are copied, as CUDA does it.
  void bring_to_device() {
    for (auto& a : args) {
      bool indices = a.isOptionalTensorList();
      a = map_tensors(a, [&](const at::Tensor& t) -> at::Tensor {
        if (!t.defined() || t.is_privateuseone()) return t;
        if (t.dim() && indices) return t.to(c10::Device(kDevice, 0));
        TORCH_CHECK(t.dim() == 0, "simdev: ", name, ": expected all tensors to be on the device, but one of ", t.sizes(), " is on ", t.device());
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
        return t.clone();       // its value now, whatever becomes of it later
      });
    }
  }

  static IValue on(const IValue& v, c10::Device d) { return v.isDevice() ? IValue(d) : v.isGenerator() ? IValue() : v; }

  // Runs the op without data to learn the sizes of its results. What cannot be said without data has to be waited for.
  void infer() {
    auto key = signature();
    auto& known = inferred();
    if (!key.empty()) {
      std::lock_guard<std::mutex> l(known.m);
      if (auto it = known.shapes.find(key); it != known.shapes.end()) { shapes = it->second; return; }
    }
    if (name == "aten::_grouped_mm" && args[0].toTensor().dim() == 2 && args[1].toTensor().dim() == 3) {  // torch infers it for bf16 only
      auto x = args[0].toTensor();
      shapes = {at::empty({x.size(0), args[1].toTensor().size(2)}, x.options().device(at::kMeta))};
      return;
    }
    try {
      for (auto& a : args)
        shapes.push_back(on(map_tensors(a, [](const at::Tensor& t) {
          return !t.defined() || !t.is_privateuseone() ? t : at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
        }), at::kMeta));
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      op.callBoxed(&shapes);
    } catch (const std::exception&) { wait = true; shapes.clear(); return; }
    std::lock_guard<std::mutex> l(known.m);
    if (!key.empty() && known.shapes.size() < 10000) known.shapes[key] = shapes;
  }

  // Inferring takes longer than all the rest, and a model asks the same thing again and again.
  struct Inferred { std::mutex m; std::unordered_map<std::string, torch::jit::Stack> shapes; };
  static Inferred& inferred() { static auto* it = new Inferred; return *it; }

  // All that the sizes of the results can depend on; empty if there is an argument that cannot be put into words.
  std::string signature() const {
    std::ostringstream key;
    key << name << '.' << schema.overload_name() << ' ' << c10::get_default_dtype();
    for (auto& v : args) {
      key << '|';
      bool tensors = v.isTensor() || v.isTensorList() || v.isOptionalTensorList();
      if (tensors) {
        map_tensors(v, [&](const at::Tensor& t) {
          if (t.defined()) key << t.device() << t.scalar_type() << t.sizes() << t.strides() << t.unsafeGetTensorImpl()->is_wrapped_number();
          key << ';';
          return t;
        });
        if (v.isOptionalTensorList()) for (std::optional<at::Tensor> t : v.toOptionalTensorList()) key << t.has_value();
      } else if (v.isNone() || v.isInt() || v.isDouble() || v.isBool() || v.isIntList() || v.isString() || v.isDevice() || v.isDoubleList()) {
        key << v;
      } else return "";
    }
    return key.str();
  }

  void resize_outputs() {
    for (size_t r = 0; r < shapes.size(); r++) {
      if (same_as[r] < 0 || !shapes[r].isTensor() || !args[same_as[r]].isTensor()) continue;
      auto out = args[same_as[r]].toTensor();
      if (out.sizes() != shapes[r].toTensor().sizes()) out.resize_(shapes[r].toTensor().sizes());
    }
  }

  // Some kernels read a part of an argument, and the data of another one says which: a grouped product does not touch the weights of empty groups,
  // indexing only the rows that are asked for. The rest may be on its way at the time. The checker looks at that data when it is known, and nobody
  // is told that it has waited.
  at::Tensor look(const at::Tensor& t) const {
    uint64_t before = issue(current(), {"look", "op", 0, [] {}}, {});
    { WithoutGil g; streams().get(current()).wait(before); }
    return Operand(t).on_cpu().to(at::kLong).contiguous();
  }

  // The argument of which only rows are read, and those rows; -1 if there is none.
  int partly(std::vector<int64_t>& rows) const {
    if (name == "aten::_grouped_mm" && args[1].toTensor().dim() == 3 && args[2].isTensor()) {
      auto ends = look(args[2].toTensor());
      int64_t start = 0;
      for (int64_t i = 0; i < ends.numel(); i++) {
        int64_t end = ends.const_data_ptr<int64_t>()[i];
        if (end > start) rows.push_back(i);
        start = end;
      }
      return 1;
    }
    if (name != "aten::index" || !args[0].toTensor().is_privateuseone()) return -1;
    auto indices = args[1].toOptionalTensorList();
    if (indices.size() != 1) return -1;
    std::optional<at::Tensor> only = indices.get(0);
    auto from = args[0].toTensor();
    bool apart = from.dim() > 1 && from.stride(0) > from[0].numel();
    if (!apart || !only || !only->is_privateuseone() || only->scalar_type() == at::kBool) return -1;
    auto index = look(*only);
    for (int64_t i = 0; i < index.numel(); i++) {
      int64_t row = index.const_data_ptr<int64_t>()[i];
      if (row >= -from.size(0) && row < from.size(0)) rows.push_back(row < 0 ? row + from.size(0) : row);
    }
    return 0;
  }

  std::vector<Use> uses() const {
    std::vector<Use> out;
    std::vector<int64_t> rows;
    int part = partly(rows);
    for (int64_t row : rows) out.push_back({Operand(args[part].toTensor().select(0, row)).at, false});
    for (size_t i = 0; i < args.size(); i++)
      if ((int)i != part) map_tensors(args[i], [&](const at::Tensor& t) {
        if (t.defined() && t.is_privateuseone()) out.push_back({Operand(t).at, writes(i)});
        return t;
      });
    return out;
  }
};

// What a worker needs to run the op: arguments whose tensors are addresses and sizes.
struct Work {
  c10::OperatorHandle op;
  std::string name;
  std::vector<IValue> args;                            // with holes for the device's tensors
  std::vector<std::vector<std::optional<Operand>>> operands;

  explicit Work(const Call& c) : op(c.op), name(c.name) {
    for (size_t i = 0; i < c.args.size(); i++) {
      auto& found = operands.emplace_back();
      auto hole = map_tensors(c.args[i], [&](const at::Tensor& t) {
        bool ours = t.defined() && t.is_privateuseone();
        found.push_back(ours ? std::optional<Operand>(Operand(t)) : std::nullopt);
        return ours ? at::empty({0}) : t;
      });
      if (c.schema.arguments()[i].type()->str().rfind("Generator", 0) == 0) hole = random(hole);
      args.push_back(hole.isDevice() ? IValue(c10::Device(at::kCPU)) : hole);
    }
  }

  static IValue random(const IValue& v) {
    auto g = v.isGenerator() ? v.toGenerator() : default_generator();
    auto* ours = dynamic_cast<Generator*>(g.unsafeGetGeneratorImpl());
    TORCH_CHECK(ours, "simdev: expected a generator of the device, but found one of ", g.device());
    return ours->cpu;
  }

  torch::jit::Stack run() const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < args.size(); i++) {
      size_t j = 0;
      stack.push_back(map_tensors(args[i], [&](const at::Tensor& t) { auto& o = operands[i][j++]; return o ? o->on_cpu() : t; }));
    }
    if (name == "aten::histc") return integer_histc(std::move(stack));
    if (name == "aten::convolution_overrideable") {  // what a device has to offer for aten::convolution, which on the CPU has other parts
      auto a = [&](int i) { return stack[i].toIntVector(); };
      auto bias = stack[2].isNone() ? std::optional<at::Tensor>() : stack[2].toOptional<at::Tensor>();
      return {at::convolution(stack[0].toTensor(), stack[1].toTensor(), bias, a(3), a(4), a(5), stack[6].toBool(), a(7), stack[8].toInt())};
    }
    op.callBoxed(&stack);
    return stack;
  }

  // CUDA's histc counts integers, the CPU's does not.
  torch::jit::Stack integer_histc(torch::jit::Stack stack) const {
    auto x = stack[0].toTensor();
    if (at::isIntegralType(x.scalar_type(), true)) stack[0] = x.to(at::kDouble);
    op.callBoxed(&stack);
    stack[0] = stack[0].toTensor().to(x.scalar_type());
    return stack;
  }
};

void take_time(const std::string& name, Time start) {
  auto cfg = settings().get();
  auto it = cfg->op_time.find(name);
  if (it == cfg->op_time.end()) it = cfg->op_time.find("");
  if (it != cfg->op_time.end() && it->second > 0) std::this_thread::sleep_until(start + seconds(it->second));
}

at::Tensor like(const at::Tensor& t) {  // the same sizes and strides, on the device
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(kDevice, 0)));
}

// The host waits for the op, and sees its errors.
void run_now(Call& c, torch::jit::Stack* stack) {
  auto work = std::make_shared<Work>(c);
  auto results = std::make_shared<torch::jit::Stack>();
  auto error = std::make_shared<std::exception_ptr>();
  issue(current(), {c.name, "op", 0, [work, results, error] {
    auto start = Clock::now();
    try { below_autograd([&] { *results = work->run(); }); } catch (...) { *error = std::current_exception(); }
    take_time(work->name, start);
  }}, c.uses());
  synchronize(current(), c.name.substr(c.name.find("::") + 2));
  if (*error) std::rethrow_exception(*error);
  for (size_t r = 0; r < c.same_as.size(); r++) {
    if (c.same_as[r] >= 0) { stack->push_back(c.args[c.same_as[r]]); continue; }
    stack->push_back(map_tensors((*results)[r], [](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto out = like(t);
      Operand o(out);
      if (o.data) below_autograd([&] { o.on_cpu().copy_(t); });
      return out;
    }));
  }
}

void run_later(Call& c, torch::jit::Stack* stack) {
  auto work = std::make_shared<Work>(c);
  auto uses = c.uses();
  std::vector<std::optional<Operand>> outs;
  for (size_t r = 0; r < c.same_as.size(); r++) {
    if (c.same_as[r] >= 0) { stack->push_back(c.args[c.same_as[r]]); continue; }
    stack->push_back(map_tensors(c.shapes[r], [&](const at::Tensor& t) {
      outs.emplace_back();
      if (!t.defined()) return t;
      auto out = like(t);
      outs.back().emplace(out);
      uses.push_back({outs.back()->at, true});
      return out;
    }));
  }
  issue(current(), {c.name, "op", 0, [work, outs = std::move(outs), same_as = c.same_as] {
    auto start = Clock::now();
    below_autograd([&] {
      auto results = work->run();
      size_t j = 0;
      for (size_t r = 0; r < same_as.size(); r++) {
        if (same_as[r] >= 0) continue;
        map_tensors(results[r], [&](const at::Tensor& t) { auto& o = outs[j++]; if (o && o->data) o->on_cpu().copy_(t); return t; });
      }
    });
    take_time(work->name, start);
  }}, uses);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_alive();
  Call c(op, stack);
  c.bring_to_device();
  if (!c.wait) c.infer();
  if (c.is_view) {  // of the same memory, as the sizes without data say
    TORCH_CHECK(c.shapes.size() == 1 && c.shapes[0].isTensor(), "simdev: ", c.name, " is a kind of view that is not known here");
    auto base = c.args[c.same_as[0]].toTensor();
    auto t = c.shapes[0].toTensor();
    TORCH_CHECK(t.scalar_type() == base.scalar_type(), "simdev: ", c.name, " is a kind of view that is not known here");
    stack->push_back(base.as_strided(t.sizes(), t.strides(), base.storage_offset() + t.storage_offset()));
    return;
  }
  counters().add("ops");
  c.resize_outputs();
  if (c.wait) run_now(c, stack); else run_later(c, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view_as_complex", view_as_complex);
  m.impl("view_as_real", view_as_real);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // one kernel, as in CUDA; torch would make many of it
}

}  // namespace simdev
