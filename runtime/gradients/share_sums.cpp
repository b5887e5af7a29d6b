#include "runtime/gradients/share_sums.hpp"

#include <utility>

#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {

ShareSums::ShareSums(JobContext& job, ComputeContext& compute, HostMirror& mirror,
                     std::span<const StageBinding> stages)
    : compute_(compute), mirror_(mirror) {
  const RankGroup& group = job.group(Axis::kTensor);
  sharers_ = group.ranks->size() == 1 ? nullptr : group.collectives.get();
  for (const StageBinding& stage : stages) {
    Joined joined{.stage = stage.index, .set = stage.parameters, .parameters = {}};
    for (Parameter* each : stage.parameters->all()) {
      if (!each->share_grads.empty()) joined.parameters.push_back(each);
    }
    if (!joined.parameters.empty()) stages_.push_back(std::move(joined));
  }
}

void ShareSums::join(int stage) {
  for (const Joined& joined : stages_) {
    if (joined.stage != stage) continue;
    sum_shards(joined);
    for (Parameter* each : joined.parameters) {
      const Tensor& sum = each->share_grads.front();
      if (GradientAccess::next(*each) == Write::kOverwrite) {
        copy_async(each->grad.data, sum.data, sum.spec.bytes(), compute_.stream());
      } else {
        add(compute_, sum, each->grad);
      }
      for (const Tensor& share : each->share_grads) {
        fill_zero_async(share.data, share.spec.bytes(), compute_.stream());
      }
    }
  }
}

// The first shares get the sums.
void ShareSums::sum_shards(const Joined& joined) {
  const std::span<float> sum = joined.set->flat_shares(0);
  const auto share = [&](std::size_t number) {
    const std::span<float> floats = joined.set->flat_shares(static_cast<int>(number));
    return Tensor{floats.data(), {DType::kF32, Shape{std::ssize(floats)}}};
  };
  add_leaves(at(joined.parameters.front()->shares),
             [&](std::size_t into, std::size_t from) { add(compute_, share(from), share(into)); });
  if (sharers_ == nullptr) return;
  sharers_->ordered_sum(mirror_.read_back(sum), mirror_.owner(joined.set->memory()));
  mirror_.write_back();
}

}  // namespace sluice
