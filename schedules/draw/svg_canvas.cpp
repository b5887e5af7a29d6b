#include "schedules/draw/svg_canvas.hpp"

#include <array>
#include <charconv>
#include <cmath>

#include "schedules/model/index.hpp"

namespace sluice {
namespace {

struct Colour {
  int red = 0, green = 0, blue = 0;
};

// Indexed by the first four ActionKinds.
constexpr std::array<Colour, 4> kColours = {Colour{38, 84, 160}, Colour{58, 125, 68},
                                            Colour{23, 135, 145}, Colour{124, 74, 156}};

}  // namespace

std::string svg_number(double value) {
  std::array<char, 32> text{};
  const auto result =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, 1);
  std::string digits(text.data(), result.ptr);
  if (digits.ends_with(".0")) digits.resize(digits.size() - 2);
  return digits;
}

std::string svg_plain(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value,
                                     std::chars_format::general, 6)
                           .ptr};
}

std::string svg_escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '&') {
      safe += "&amp;";
    } else {
      safe += (c >= ' ' && c <= '~') ? c : '?';
    }
  }
  return safe;
}

Shade shade_of(ActionKind kind, int chunk, int chunks) {
  const Colour base = kColours[at(kind)];
  const double lightening = chunks < 2 ? 0.15 : 0.62 * chunk / (chunks - 1);
  const auto lightened = [&](int part) {
    return std::to_string(static_cast<int>(std::lround(part + (255 - part) * lightening)));
  };
  return {
      "rgb(" + lightened(base.red) + "," + lightened(base.green) + "," + lightened(base.blue) + ")",
      lightening > 0.35};
}

void SvgCanvas::text(double x, double y, std::string_view words, std::string_view extra) {
  body_ += "<text x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" ";
  body_.append(extra).append(">").append(words).append("</text>\n");
}

void SvgCanvas::rectangle(double x, double y, double width, double height, std::string_view fill,
                          std::string_view title) {
  body_ += "<rect class=\"b\" x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" width=\"" +
           svg_number(width) + "\" height=\"" + svg_number(height) + "\" fill=\"";
  body_.append(fill).append("\"");
  if (title.empty()) {
    body_ += "/>\n";
  } else {
    body_.append("><title>").append(title).append("</title></rect>\n");
  }
}

void SvgCanvas::path(std::string_view data, std::string_view attributes) {
  body_.append("<path d=\"").append(data).append("\" ").append(attributes).append("/>\n");
}

std::string SvgCanvas::finish(double width, double height) const {
  const std::string size = svg_number(width) + " " + svg_number(height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + svg_number(width) + "\" height=\"" +
         svg_number(height) + "\" viewBox=\"0 0 " + size +
         "\" font-family=\"DejaVu Sans, Arial, sans-serif\" font-size=\"" + svg_number(kFontSize) +
         "\">\n<style>.w{fill:#fff}.d{fill:#111}.b{stroke:#fff;stroke-width:.8}"
         ".n{text-anchor:middle}</style>\n<rect width=\"100%\" height=\"100%\" "
         "fill=\"#fff\"/>\n" +
         body_ + "</svg>\n";
}

}  // namespace sluice
